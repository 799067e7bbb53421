"""What a token and a short chat cost a Processor over HTTP, against gRPC, by turns in one process.

    python -m tests.benchmarks.http_cost                     # a table
    python -m tests.benchmarks.http_cost --rounds 5 --streams 64,256

The engine is simulated; the Processor may not gather tokens, so each is an event or a message.
HTTP/1.1 has a connection for each stream; gRPC is measured with as many and with four, HTTP/2 with
four. A ratio is HTTP over gRPC within a round. CPU is what the kernel charged to the Processor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

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


async def _rounds(
    processor: ServiceProcess, streams: int, tokens: int, times: int, rounds: int
) -> dict[str, list[Cost]]:
    found: dict[str, list[Cost]] = {}
    for turn in range(rounds):
        for name, way in list(_ways(processor, streams).items())[:: -1 if turn % 2 else 1]:
            found.setdefault(name, []).append(await _measure(way(), processor, tokens, times))
    return found


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


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.http_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", default="64", help="at once, such as 64,256 (64)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a row's streams (4)")
    parser.add_argument("--rounds", type=int, default=3, help="how often all is measured (3)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_random_model(Path(folder, "tiny"))
        for streams in map(int, given.streams.split(",")):
            for step_ms, tokens, times in (
                (10.0, tokens_each(streams, 10.0, given.seconds), 1),
                (1.0, _SHORT_TOKENS, _SHORT_TIMES),
            ):
                pair = services(
                    model, Path(folder, "log"), step_ms, processor_flags={"max_pace_s": 0}
                )
                with running(*pair):
                    found = uvloop.run(_rounds(pair[1], streams, tokens, times, given.rounds))
                what = "a token" if times == 1 else f"a chat of {tokens} tokens"
                _report(f"{streams} streams, steps of {step_ms:g} ms: CPU {what}", found)


if __name__ == "__main__":
    main()
