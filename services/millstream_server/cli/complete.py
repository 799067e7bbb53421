"""`millstream complete`: continue a raw prompt, streaming."""

from __future__ import annotations

import argparse
import asyncio
import sys

from millstream.v1 import processor_pb2, processor_pb2_grpc
from millstream_server.cli.answers import Answer, write_stats, write_text
from millstream_server.cli.client import call_processor
from millstream_server.cli.sampling import generation_options


def run(args: argparse.Namespace) -> int:
    """Print the continuation as it comes; answers the exit code."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        print("error: there is nothing to continue: the prompt is empty", file=sys.stderr)
        return 1
    request = processor_pb2.CompleteRequest(
        model=args.model, text=prompt, options=generation_options(args)
    )
    return asyncio.run(
        call_processor(args.address, lambda stub: _complete(stub, request, args.show_usage))
    )


async def _complete(
    stub: processor_pb2_grpc.ProcessorServiceStub,
    request: processor_pb2.CompleteRequest,
    show_usage: bool,  # noqa: FBT001  # a flag's value
) -> int:
    answer = Answer()
    try:
        async for response in stub.Complete(request):
            write_text(answer.add(response))
    finally:
        if answer.text:
            write_text("\n")
    write_stats(answer, always=show_usage)
    return 0
