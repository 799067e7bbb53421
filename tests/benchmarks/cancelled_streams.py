"""Does memory come back after 100,000 cancelled streams?

    python -m tests.benchmarks.cancelled_streams                  # about ten minutes
    python -m tests.benchmarks.cancelled_streams --streams 5000

Streams are cancelled in every way a client can leave: a chat before its first token, after it,
without a word said, and by a deadline; a Complete after its first message; a raw Decode stream of
a worker with requests running in its slots; Watch of health and WatchLoad, which never end by
themselves. Nine in ten are chats. Memory "before" is taken after a warm-up of the same load
(--warm-up streams), when buffers, threads and caches have the size this load takes; "after" may
be at most 10 % more. Work, files, sockets and threads must be back to what they were.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import decode_pb2_grpc, processor_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.processes.simulated_suite import SimulatedSuite, aggregated
from tests.support.processor.chats import Conversation, completion, options, start
from tests.support.worker.worker_streams import decode_stream

_AT_ONCE = 64
_CHANNELS = 4
_TOKENS = 400
_STEP_S = 0.01
_MAX_GROWTH = 1.10
_LIMIT_S = 20.0
_REPORTS = 10


@dataclass
class Stubs:
    """Both ends that a client can reach."""

    processors: list[Any]
    channels: list[Any]
    """Of the Processor, then of the worker."""
    decode: Any
    worker: Any


class Leaver:
    """Opens streams and leaves them."""

    def __init__(self, stubs: Stubs, chance: random.Random) -> None:
        self._stubs = stubs
        self._chance = chance
        self._ways: dict[str, tuple[int, Callable[[], Awaitable[Any]]]] = {
            "chat before its first token": (30, self.chat_early),
            "chat after its first token": (38, self.chat_late),
            "chat by its deadline": (10, self.chat_deadline),
            "chat without a word": (5, self.chat_silent),
            "completion": (9, self.complete),
            "decode stream": (4, self.decode),
            "health watch": (2, self.health_watch),
            "load watch": (2, self.load_watch),
        }
        self.left: collections.Counter[str] = collections.Counter()

    async def leave_one(self) -> None:
        """Open a stream in some way, cancel it, wait for its status."""
        weights = [weight for weight, _ in self._ways.values()]
        (name,) = self._chance.choices(list(self._ways), weights)
        async with asyncio.timeout(_LIMIT_S):
            call = await self._ways[name][1]()
            call.cancel()
            code = await call.code()
        assert code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED), (name, code)
        self.left[name] += 1

    @property
    def _processor(self) -> Any:
        return self._chance.choice(self._stubs.processors)

    async def _chat(self, **call: Any) -> Conversation:
        conversation = Conversation(self._processor, **call)
        await conversation.say(start("hi " * self._chance.randint(1, 30), opts=options(_TOKENS)))
        return conversation

    async def chat_early(self) -> Any:
        conversation = await self._chat()
        await asyncio.sleep(self._chance.choice((0, 0, 0.001, 0.003)))
        return conversation.call

    async def chat_late(self) -> Any:
        conversation = await self._chat()
        await conversation.read()
        return conversation.call

    async def chat_deadline(self) -> Any:
        conversation = await self._chat(timeout=0.2)
        try:
            while await conversation.read():
                pass
        except grpc.aio.AioRpcError:
            pass
        return conversation.call

    async def chat_silent(self) -> Any:
        return Conversation(self._processor).call

    async def complete(self) -> Any:
        call = self._processor.Complete(completion("hi", options(_TOKENS)))
        await call.read()
        return call

    async def decode(self) -> Any:
        stream = decode_stream(self._stubs.decode)
        for slot in range(4):
            await stream.start(slot, [5, 6, 7], max_new_tokens=_TOKENS, ignore_eos=True)
        await stream.first_token(0)
        return stream.call

    async def health_watch(self) -> Any:
        stub = health_pb2_grpc.HealthStub(self._chance.choice(self._stubs.channels))
        call = stub.Watch(health_pb2.HealthCheckRequest())
        await call.read()
        return call

    async def load_watch(self) -> Any:
        call = self._stubs.worker.WatchLoad(worker_pb2.WatchLoadRequest())
        await call.read()
        return call


@dataclass
class Cancelled:
    """One run."""

    suite: SimulatedSuite
    arguments: argparse.Namespace
    verdict: Verdict = field(default_factory=Verdict)
    memory: list[dict[str, float]] = field(default_factory=list)

    async def run(self) -> Verdict:
        """Warm up, look, cancel, look again."""
        suite, verdict = self.suite, self.verdict
        await suite.until_connected()
        idle = suite.footprints()
        count = self.arguments.streams
        async with _stubs(suite) as stubs:
            leaver = Leaver(stubs, random.Random(2))
            await self._leave(leaver, self.arguments.warm_up)
            await suite.expect_idle(verdict)
            warm = suite.footprints()
            for i in range(_REPORTS):
                await self._leave(leaver, count * (i + 1) // _REPORTS - count * i // _REPORTS)
                self.memory.append({n: f.rss_mb for n, f in suite.footprints().items()})
                progress(f"{count * (i + 1) // _REPORTS} cancelled: {self.memory[-1]}")
        await suite.expect_idle(verdict)
        await suite.expect_no_leak(verdict, idle)
        after = suite.footprints()
        for name in warm:
            ratio = after[name].rss_mb / warm[name].rss_mb
            verdict.measured[name] = {
                "before": asdict(warm[name]),
                "after": asdict(after[name]),
                "ratio": {"rss": ratio},
            }
            if count >= self.arguments.judge:
                verdict.expect(
                    ratio <= _MAX_GROWTH, f"memory of {name} is {ratio:.2f} times what it was"
                )
        await suite.stop(verdict)
        suite.expect_no_complaints(verdict)
        verdict.measured["streams_cancelled"] = count
        verdict.measured["ways"] = dict(leaver.left)
        verdict.measured["rss_mb_along_the_way"] = {
            str(count * (i + 1) // _REPORTS): mb for i, mb in enumerate(self.memory)
        }
        return verdict

    async def _leave(self, leaver: Leaver, count: int) -> None:
        left = iter(range(count))

        async def client() -> None:
            for _ in left:
                await leaver.leave_one()

        await asyncio.gather(*(client() for _ in range(min(_AT_ONCE, count))))


@contextlib.asynccontextmanager
async def _stubs(suite: SimulatedSuite) -> AsyncIterator[Stubs]:
    """Connect to the one Processor and the first worker."""
    (processor,) = suite.processors.values()
    worker = next(iter(suite.workers.values()))
    addresses = [processor.address] * _CHANNELS + [worker.address]
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            )
            for address in addresses
        ]
        yield Stubs(
            processors=[
                processor_pb2_grpc.ProcessorServiceStub(channel) for channel in channels[:-1]
            ],
            channels=channels[-2:],
            decode=decode_pb2_grpc.DecodeServiceStub(channels[-1]),
            worker=worker_pb2_grpc.WorkerServiceStub(channels[-1]),
        )


def run(arguments: argparse.Namespace) -> Verdict:
    """Start the suite, leave it again and again."""
    with folder_for(arguments) as folder:
        suite = aggregated(folder, workers=1, processors=1, simulated_step_s=_STEP_S)
        with suite.running():
            verdict: Verdict = uvloop.run(Cancelled(suite, arguments).run())
        return verdict


def main() -> int:
    """Parse arguments, cancel, report."""
    parser = parser_of("cancelled_streams", __doc__)
    parser.add_argument("--streams", type=int, default=100_000, help="how many (100000)")
    parser.add_argument("--warm-up", type=int, default=3000, help="how many before (3000)")
    parser.add_argument(
        "--judge", type=int, default=10_000, help="memory is judged from so many on (10000)"
    )
    arguments = parser.parse_args()
    return run(arguments).conclude(as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
