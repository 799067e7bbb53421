"""`millstream complete`: continue a raw prompt, streaming."""

from __future__ import annotations

import argparse
import asyncio
import sys

from millstream_client import Client
from millstream_server.cli.answers import show
from millstream_server.cli.client import call_processor
from millstream_server.cli.sampling import knobs_given


def run(args: argparse.Namespace) -> int:
    """Print the continuation while it streams; return the exit code."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        print("error: the prompt is empty", file=sys.stderr)
        return 1
    return asyncio.run(call_processor(args, lambda client, _: _complete(client, args, prompt)))


async def _complete(client: Client, args: argparse.Namespace, prompt: str) -> int:
    stream = client.complete(prompt, model=args.model, **knobs_given(args))
    await show(stream, always_stats=args.show_usage)
    return 0
