"""What a token and a short chat cost a Processor over HTTP, against gRPC, by turns in one process.

    python -m tests.benchmarks.http_cost                     # a table
    python -m tests.benchmarks.http_cost --rounds 5 --streams 64,256
    python -m tests.benchmarks.http_cost --against ../before --rounds 7    # ten minutes

The engine is simulated; the Processor may not gather tokens, so each is an event or a message.
HTTP/1.1 has a connection for each stream; gRPC is measured with as many and with four, HTTP/2 with
four. A ratio is HTTP over gRPC within a round. CPU is what the kernel charged to the Processor.
With --against each way is compared with itself in the other checkout (tests/benchmarks/against.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from tests.benchmarks.against import Figures, add_arguments, compare, environment_of, rounds_of
from tests.benchmarks.http_chats import http1, http2
from tests.benchmarks.token_cost import FEW_CONNECTIONS, chat, services, stubs_for, tokens_each
from tests.support.models.models import make_random_model
from tests.support.processes.processes import cpu_s
from tests.support.processes.suite import ServiceProcess, running

_SHORT_TOKENS, _SHORT_TIMES = 2, 20


@dataclass(frozen=True)
class Cost:
    """Of one way, in one round."""

    us: float
    """CPU of the Processor: per token or, of short chats, per chat."""
    ttft_s: float
    """The median."""
    per_message: float
    """Tokens."""


@contextlib.asynccontextmanager
async def _grpc(processor: ServiceProcess, streams: int, most: int) -> AsyncIterator[list[Any]]:
    async with stubs_for(processor, streams, most) as stubs:

        async def one(stub: Any, tokens: int) -> tuple[float, int, int]:
            answer = await chat(stub, tokens)
            return answer.ttft_s, answer.tokens, answer.messages

        yield [lambda tokens, i=i: one(stubs[i % len(stubs)], tokens) for i in range(streams)]


async def _measure(
    way: contextlib.AbstractAsyncContextManager[list[Any]],
    processor: ServiceProcess,
    tokens: int,
    times: int,
) -> Cost:
    async with way as chats:
        await asyncio.gather(*(each(8) for each in chats))
        before = cpu_s(processor.pid)
        answers: list[tuple[float, int, int]] = []
        for _ in range(times):
            answers += await asyncio.gather(*(each(tokens) for each in chats))
        spent_s = cpu_s(processor.pid) - before
    total = sum(count for _, count, _ in answers)
    assert total == tokens * len(answers)
    divisor = len(answers) if times > 1 else total
    messages = sum(count for _, _, count in answers)
    return Cost(
        spent_s / divisor * 1e6, statistics.median(a for a, _, _ in answers), total / messages
    )


def _ways(processor: ServiceProcess, streams: int) -> dict[str, Any]:
    return {
        "http/1.1": lambda: http1(processor, streams),
        f"http/2, {FEW_CONNECTIONS} connections": lambda: http2(
            processor, streams, FEW_CONNECTIONS
        ),
        "grpc": lambda: _grpc(processor, streams, streams),
        f"grpc, {FEW_CONNECTIONS} connections": lambda: _grpc(processor, streams, FEW_CONNECTIONS),
    }


@dataclass(frozen=True)
class Load:
    """What is measured on one pair of processes. A chat that comes many times is a short one."""

    streams: int
    step_ms: float
    tokens: int
    times: int

    def __str__(self) -> str:
        what = "a token" if self.times == 1 else f"a chat of {self.tokens} tokens"
        return f"{self.streams} streams, steps of {self.step_ms:g} ms: CPU {what}"

    def rounds(self, folder: Path, count: int, checkout: Path | None) -> dict[str, list[Cost]]:
        """Start a worker and a Processor, measure each way so often; answers by the way's name."""
        model = make_random_model(folder / "tiny")
        pair = services(
            model,
            folder / "log",
            self.step_ms,
            env=environment_of(checkout),
            processor_flags={"max_pace_s": 0},
        )
        with running(*pair):
            found: dict[str, list[Cost]] = uvloop.run(self._rounds(pair[1], count))
        return found

    async def _rounds(self, processor: ServiceProcess, count: int) -> dict[str, list[Cost]]:
        found: dict[str, list[Cost]] = {}
        for turn in range(count):
            ways = list(_ways(processor, self.streams).items())
            for name, way in ways[:: -1 if turn % 2 else 1]:
                cost = await _measure(way(), processor, self.tokens, self.times)
                found.setdefault(name, []).append(cost)
        return found

    def figures(self, folder: Path, checkout: Path) -> Figures:
        """Measure each way once."""
        found: dict[str, float] = {}
        for name, (cost,) in self.rounds(folder, 1, checkout).items():
            found |= {f"{name}: us": cost.us, f"{name}: ttft_ms": cost.ttft_s * 1e3}
        return found


def _loads(given: argparse.Namespace) -> Iterator[Load]:
    for streams in map(int, given.streams.split(",")):
        yield Load(streams, 10.0, tokens_each(streams, 10.0, given.seconds), 1)
        yield Load(streams, 1.0, _SHORT_TOKENS, _SHORT_TIMES)


def _report(title: str, found: dict[str, list[Cost]]) -> None:
    print(title)  # noqa: T201
    for name, costs in found.items():
        print(  # noqa: T201
            f"  {name:23} {statistics.median(c.us for c in costs):8.2f} µs"
            f"  {statistics.median(c.per_message for c in costs):5.2f} tokens a message"
            f"  TTFT p50 {statistics.median(c.ttft_s for c in costs) * 1e3:7.2f} ms"
        )
    for http in (name for name in found if name.startswith("http")):
        for grpc in (name for name in found if name.startswith("grpc")):
            pairs = list(zip(found[http], found[grpc], strict=True))
            ratios = sorted(h.us / g.us for h, g in pairs)
            added = statistics.median(h.ttft_s - g.ttft_s for h, g in pairs)
            print(  # noqa: T201
                f"  {http} / {grpc}: {statistics.median(ratios):.2f}"
                f" ({ratios[0]:.2f} to {ratios[-1]:.2f}), TTFT {added * 1e3:+.2f} ms"
            )


def main() -> int:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.http_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", default="64", help="at once, such as 64,256 (64)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a row's streams (4)")
    add_arguments(parser, figures="*: us", rounds=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.against:
            return compare(
                {str(load): partial(load.figures, folder) for load in _loads(given)}, given
            )
        for load in _loads(given):
            _report(str(load), load.rounds(folder, rounds_of(given), None))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
