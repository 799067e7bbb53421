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
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from millstream_server.control.engine import EngineInfo
from millstream_server.engines.sglang.engine import SglangEngine, SglangEngineConfig
from millstream_server.engines.sglang.lifetime import SglangLifetime
from millstream_server.engines.sglang.loads import RankProgress
from millstream_server.generation.output import Finish, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest, Prompt, new_engine_id
from millstream_server.generation.sampling import Sampling
from millstream_server.links.fleet import Fleet
from millstream_server.routing.discovery.sources import StaticDiscovery
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.router import Router
from millstream_server.runtime.errors import ServingError
from tests.support.models.models import make_random_model
from tests.support.processes.ports import free_port
from tests.support.processes.processes import cpu_s
from tests.support.processes.suite import ServiceProcess, running

_PROMPT_TOKENS = 8
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


class Counter:
    """A sink that counts."""

    def __init__(self) -> None:
        self.tokens = 0
        self.messages = 0
        self.ended = asyncio.get_running_loop().create_future()

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        self.tokens += len(token_ids)
        self.messages += 1

    def finish(self, finish: Finish) -> None:
        self.ended.set_result(None)

    def fail(self, error: ServingError) -> None:
        self.ended.set_exception(error)


def request(number: int, tokens: int) -> GenerationRequest:
    return GenerationRequest(
        engine_id=new_engine_id(),
        prompt=Prompt([(7 * number + i) % 1000 + 10 for i in range(_PROMPT_TOKENS)]),
        sampling=Sampling(max_new_tokens=tokens, temperature=0.0, ignore_eos=True),
    )


async def answered(
    submit: Callable[[GenerationRequest, OutputSink], object], streams: int, tokens: int
) -> None:
    """Run so many requests at once; each must get a message per token."""
    sinks = [Counter() for _ in range(streams)]
    for number, sink in enumerate(sinks):
        submit(request(number, tokens), sink)
    await asyncio.gather(*(sink.ended for sink in sinks))
    assert [sink.tokens for sink in sinks] == [tokens] * streams
    messages = sum(sink.messages for sink in sinks)
    assert messages > 0.9 * streams * tokens, f"{messages} messages: not one per token"


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
    await _obey(pipe, lambda streams, tokens: answered(engine.submit, streams, tokens))
    await engine.close()


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


async def _over_the_wire(worker: ServiceProcess, streams: int, tokens: int) -> float:
    router = Router(lambda: make_policy(PolicyName.LEAST_LOADED))
    fleet = Fleet(StaticDiscovery([worker.address]), router)
    fleet.open()
    while not router.ready("tiny"):
        await asyncio.sleep(0.01)
    leg = router.plan(RoutingRequest(model="tiny")).legs[0]

    def submit(asked: GenerationRequest, sink: OutputSink) -> None:
        asked = replace(asked, request_id=asked.engine_id)
        fleet.generate(leg.place.worker.address, asked, sink)

    before = cpu_s(worker.pid)
    await answered(submit, streams, tokens)
    spent_s = cpu_s(worker.pid) - before
    await fleet.close()
    return spent_s


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
        found["worker"] = lambda n, tokens: runner.run(_over_the_wire(worker, n, tokens))
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
