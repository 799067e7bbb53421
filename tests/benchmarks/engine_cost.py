"""What a token of a real SGLang costs the process that serves it, beside SGLang itself.

    python -m tests.benchmarks.engine_cost                      # a table, about four minutes
    python -m tests.benchmarks.engine_cost --metrics --streams 16,64,128

Streams of a tiny model on the CPU, one token a step and stream. Three processes take turns, each
with schedulers of its own, which are not counted:

- bare: `sgl.Engine.async_generate` and a loop that counts tokens,
- adapter: `SglangEngine` and sinks that count them,
- worker: a decode worker, its tokens sent over its stream to this process.

A figure is CPU µs per token, user and system, of all threads of the process: the median of the
rounds; and the ratio to bare, the median of the rounds' ratios. The first round warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from millstream_server.control.engine import EngineInfo
from millstream_server.engines.sglang.engine import SglangEngine, SglangEngineConfig
from millstream_server.engines.sglang.lifetime import SglangLifetime
from millstream_server.engines.sglang.loads import RankProgress
from tests.support.benchmarks.token_load import answered, over_the_wire, request
from tests.support.models.models import make_random_model
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running

_POOL_TOKENS = 65_536
_START_S = 300
_KINDS = ("bare", "adapter", "worker")


@dataclass(frozen=True)
class Row:
    """Of so many streams: CPU µs per token by kind, and the ratios to bare."""

    streams: int
    tokens: int
    us_per_token: dict[str, float]
    of_bare: dict[str, float]


async def _bare(config: SglangEngineConfig, pipe: Connection) -> None:
    lifetime: SglangLifetime[EngineInfo] = SglangLifetime(lambda _: None, RankProgress())
    engine = (await lifetime.start(config)).engine

    async def one(number: int, tokens: int) -> None:
        asked = request(number, tokens)
        params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        stream = await engine.async_generate(
            input_ids=list(asked.token_ids), sampling_params=params, stream=True
        )
        assert sum([len(chunk["output_ids"]) async for chunk in stream]) == tokens

    async def burst(streams: int, tokens: int) -> None:
        await asyncio.gather(*(one(number, tokens) for number in range(streams)))

    await _obey(pipe, burst)
    await lifetime.close(list)


async def _adapter(config: SglangEngineConfig, pipe: Connection) -> None:
    engine = SglangEngine(config)
    await engine.start(lambda error: print(error, file=sys.stderr))  # noqa: T201
    await engine.warm_up()

    async def burst(streams: int, tokens: int) -> None:
        _check(await answered(engine.submit, streams, tokens), streams, tokens)

    await _obey(pipe, burst)
    await engine.close()


def _check(messages: int, streams: int, tokens: int) -> None:
    assert messages > 0.9 * streams * tokens, f"{messages} messages: not one per token"


async def _obey(pipe: Connection, burst: Callable[[int, int], Coroutine[Any, Any, None]]) -> None:
    """Run bursts as they are asked for, and tell the CPU seconds that each took."""
    pipe.send(0.0)
    while order := await asyncio.to_thread(pipe.recv):
        before = time.process_time()
        await burst(*order)
        pipe.send(time.process_time() - before)


def _child(kind: str, config: SglangEngineConfig, pipe: Connection) -> None:
    uvloop.run((_bare if kind == "bare" else _adapter)(config, pipe))


class InProcess:
    """An engine in a child of this process, without a server."""

    def __init__(self, kind: str, config: SglangEngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(kind, config, theirs))
        self._process.start()

    def _answer(self) -> float:
        assert self._pipe.poll(_START_S), "the engine didn't answer"
        return float(self._pipe.recv())

    def until_started(self) -> None:
        self._answer()

    def spend(self, streams: int, tokens: int) -> float:
        self._pipe.send((streams, tokens))
        return self._answer()

    def stop(self) -> None:
        self._pipe.send(())
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()


@contextlib.contextmanager
def started(
    folder: Path, streams: int, *, metrics: bool
) -> Iterator[dict[str, Callable[[int, int], float]]]:
    """Start the three; give what runs a burst on each and returns its CPU seconds."""
    model = str(make_random_model(folder / "tiny"))
    config = SglangEngineConfig(
        model_path=model,
        max_running_requests=streams,
        max_total_tokens=_POOL_TOKENS,
        metrics=metrics,
    )
    flags = {
        "model_path": model,
        "model_name": "tiny",
        "max_running_requests": streams,
        "max_total_tokens": _POOL_TOKENS,
        "metrics_listen": f"127.0.0.1:{free_port()}" if metrics else "",
    }
    worker = ServiceProcess("millstream_server.decode", flags, folder / "worker.log")
    with (
        running(worker),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        contextlib.ExitStack() as stack,
    ):
        found: dict[str, Callable[[int, int], float]] = {}
        for kind in ("bare", "adapter"):
            engine = InProcess(kind, config)
            stack.callback(engine.stop)
            engine.until_started()
            found[kind] = engine.spend

        def at_worker(count: int, tokens: int) -> float:
            spent = runner.run(over_the_wire(worker, count, tokens))
            _check(spent.messages, count, tokens)
            return spent.cpu_s

        found["worker"] = at_worker
        yield found


def measure(streams: Sequence[int], tokens: int, rounds: int, *, metrics: bool) -> Iterator[Row]:
    """Measure one row after the other."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), max(streams), metrics=metrics) as kinds,
    ):
        for count in streams:
            found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
            for number in range(rounds + 1):
                for kind in _KINDS:
                    spent_s = kinds[kind](count, tokens)
                    if number:
                        found[kind].append(1e6 * spent_s / (count * tokens))
            ratios = {
                kind: [a / b for a, b in zip(found[kind], found["bare"], strict=True)]
                for kind in _KINDS
            }
            yield Row(
                count,
                tokens,
                {kind: round(statistics.median(each), 1) for kind, each in found.items()},
                {kind: round(statistics.median(each), 2) for kind, each in ratios.items()},
            )


def _line(row: Row) -> str:
    costs = (f"{kind} {us:.1f} ({row.of_bare[kind]:.2f})" for kind, us in row.us_per_token.items())
    return f"{row.streams} streams, µs per token (ratio to bare): " + ", ".join(costs)


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.engine_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object a line, no table")
    parser.add_argument("--streams", default="16,64", help="how many at once (16,64)")
    parser.add_argument("--tokens", type=int, default=300, help="of each answer (300)")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (5)")
    parser.add_argument("--metrics", action="store_true", help="with SGLang's metrics")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    streams = [int(count) for count in arguments.streams.split(",")]
    rows = measure(streams, arguments.tokens, arguments.rounds, metrics=arguments.metrics)
    for row in rows:
        print(json.dumps(asdict(row)) if arguments.json else _line(row), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
