"""What a message costs the Processor by itself: CPU from a worker's frame to a message's bytes.

No sockets and no transport: frames are parsed as they come from a worker, and messages are
serialized as a transport does it. `stream.py` measures whole processes.

    python -m tests.benchmarks.message_path
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import uvloop

from millstream.v1 import decode_pb2, generation_pb2, processor_pb2, sampling_pb2, usage_pb2
from millstream_server.control.engine import Role, Task, WorkerDescription
from millstream_server.generation.output import OutputSink
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.links.generation_stream import GenerationStream, OpenGeneration
from millstream_server.links.slot_stream import Connection
from millstream_server.processor.conversation import Options
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.output import Pacer, TurnOutput
from millstream_server.processor.servicer import ProcessorServicer
from millstream_server.processor.telemetry import FrontTelemetry, TurnTelemetry
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.turn import Turn, TurnParts
from millstream_server.routing.plan import Plan, PlannedLeg
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.rpc.call import Source
from tests.support.models.models import byte_level_model

_TOKENS = (35, 36, 37, 38)
_DONE = generation_pb2.FINISH_REASON_LENGTH


class _Call:
    """A `Call` whose transport takes every message, in the next turn of the event loop."""

    metadata: tuple[tuple[str, str], ...] = ()
    time_left_s = None
    caller_key = "bench"

    def __init__(self) -> None:
        self.messages = 0
        self._asked = False
        self._source: Source | None = None
        self._over = asyncio.Event()

    def fail(self, failure: Exception) -> None:
        raise failure

    def ready(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._pull)

    async def send_from(self, source: Source) -> None:
        self._source = source
        await self._over.wait()

    def _pull(self) -> None:
        source, self._asked = self._source, False
        message = source.next() if source else None
        if message is not None:
            message.SerializeToString()
            self.messages += 1
        if source and source.over:
            self._over.set()


class _Admitted:
    def leave(self) -> None:
        pass


class _Core:
    """Starts completions on one worker stream, without queue and routing."""

    def __init__(self, model: TextModel, view: WorkerView, stream: GenerationStream) -> None:
        self._model = model
        self._plan = Plan((PlannedLeg(Role.AGGREGATED, view),))
        self._stream = stream
        self._parts = TurnParts(pacer=Pacer(0.05), workers=self)
        self._telemetry = FrontTelemetry()
        self.front = self
        self.prompts = SimpleNamespace(threads=None)

    call = contextlib.nullcontext
    send = ProcessorCore.send

    def generate(
        self, _address: str, request: GenerationRequest, sink: OutputSink
    ) -> OpenGeneration:
        return self._stream.start(request, sink)

    async def complete(
        self, completion: Any, _caller: object, call: Any, output: TurnOutput
    ) -> Turn:
        asked: Options = completion.options
        request = GenerationRequest(
            request_id="r",
            model="m",
            prompt=Prompt([1, 2]),
            sampling=Sampling(max_new_tokens=1 << 20),
            logprobs=LogprobOptions(top=asked.logprobs.top) if asked.logprobs else None,
        )
        turn = Turn(
            request,
            asked,
            self._model,
            cast("Any", _Admitted()),
            self._parts,
            call=call,
            output=output,
            telemetry=TurnTelemetry(self._telemetry, Task.COMPLETE),
            continuation=True,
        )
        turn.start(self._plan)
        return turn

    def end(self, turn: Turn) -> None:
        turn.close()


def _frame(slots: int, step: int, *, top: int, last: bool) -> bytes:
    frame = generation_pb2.StepFrame(
        sequence=step + 1, slots=range(slots), token_ids=[_TOKENS[step % len(_TOKENS)]] * slots
    )
    for slot in range(slots) if top else ():
        tokens = generation_pb2.TokenLogprobs(
            token_ids=[35],
            logprobs=[-0.5],
            top_counts=[top],
            top_token_ids=range(top),
            top_logprobs=[-1.0] * top,
        )
        frame.logprobs.add(slot=slot, tokens=tokens)
    for slot in range(slots) if last else ():
        usage = usage_pb2.GenerationUsage(prompt_tokens=2, completion_tokens=step + 1)
        frame.finishes.add(slot=slot, reason=_DONE, usage=usage)
    return decode_pb2.DecodeResponse(frame=frame).SerializeToString()


async def _measure(model: TextModel, streams: int, n: int, steps: int, *, top: int) -> float:
    """Return CPU microseconds per message."""
    slots = streams * n
    frames = [_frame(slots, step, top=top, last=step == steps - 1) for step in range(steps)]
    description = WorkerDescription(role=Role.AGGREGATED, model="m", engine=cast("Any", None))
    view = WorkerView("worker", description)
    stream = GenerationStream(Connection(cast("Any", None), description, view, lambda: None))
    core = _Core(model, view, stream)
    servicer = ProcessorServicer(cast("Any", core))
    asked = processor_pb2.GenerationOptions(
        n=n,
        sampling=sampling_pb2.SamplingParams(max_new_tokens=steps),
        logprobs=sampling_pb2.LogprobOptions(top=top) if top else None,
    )
    request = processor_pb2.CompleteRequest(text="hi", options=asked)
    calls = [_Call() for _ in range(streams)]
    tasks = [asyncio.ensure_future(servicer.Complete(request, cast("Any", call))) for call in calls]
    while view.in_flight < slots:
        await asyncio.sleep(0)
    began = time.process_time()
    for number, frame in enumerate(frames, start=1):
        if rest := stream._receive(decode_pb2.DecodeResponse.FromString(frame)):
            await rest
        while any(call.messages < number for call in calls):
            await asyncio.sleep(0)
    took_s = time.process_time() - began
    await asyncio.gather(*tasks)
    return took_s / sum(call.messages for call in calls) * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = TextModel.load(byte_level_model(Path(directory)))
        sys.stdout.write("us of CPU per message, median (least)\n")
        for streams, n, top in ((64, 1, 0), (256, 1, 0), (16, 4, 0), (64, 1, 5), (8, 16, 20)):
            steps = args.steps if not top else args.steps // 5
            found = [
                uvloop.run(_measure(model, streams, n, steps, top=top)) for _ in range(args.rounds)
            ]
            sys.stdout.write(
                f"{streams:4} streams, n = {n:2}, top = {top:2}:  "
                f"{statistics.median(found):6.1f} ({min(found):5.1f})\n"
            )


if __name__ == "__main__":
    main()
