"""What a token costs on its way: worker → Processor → client, each its own process, on loopback.

    python -m tests.benchmarks.stream           # a table
    python -m tests.benchmarks.stream --json    # one JSON object
    python -m tests.benchmarks.stream --against ../before --rounds 7 --max-pace-s 0    # ratios

The engine is simulated: it costs about half a microsecond per token and is counted to the worker.
CPU time is what the kernel charged to a process (user and system) between the first request and the
last answer, divided by the tokens. With --max-pace-s 0 the Processor may not gather tokens: each is
a message. With --against, each row is compared with another checkout's, as
tests/benchmarks/against.py says; not the hop, which is this process's code. How to read and repeat
it: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import uvloop

from millstream.v1 import decode_pb2, decode_pb2_grpc, generation_pb2
from millstream_server.generation.output import Finish, TokenLogprob
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.links.fleet import Fleet
from millstream_server.routing.discovery.sources import StaticDiscovery
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.router import Router
from millstream_server.runtime.errors import ServingError
from tests.benchmarks.against import (
    Figures,
    add_arguments,
    compare,
    environment_of,
    laid_out,
    rounds_of,
)
from tests.benchmarks.token_cost import (
    FEW_CONNECTIONS,
    chat,
    sampling,
    services,
    spend,
    stubs_for,
    tokens_each,
)
from tests.support.models.models import make_random_model
from tests.support.processes.processes import cpu_s, rss_mb
from tests.support.processes.suite import ServiceProcess, running

_TTFT_CALLS = 200
_EACH = (10, 64)
"""Step and streams of the row that by default is measured with a connection for each stream too."""


@dataclass
class Row:
    """One line of the result. ``step_ms`` 0: the engine as fast as it goes."""

    streams: int
    step_ms: float
    connections: int
    """Of the clients, over which the streams are spread."""
    worker_us_per_token: float
    processor_us_per_token: float
    hop_us_per_token: float
    """The Processor's end of the internal stream alone, without text and clients."""
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    direct_ttft_ms_p50: float
    tokens_per_message: float
    longest_pacing_ms: float
    worker_rss_mb: float
    processor_rss_mb: float
    client_us_per_token: float


async def direct(stub: Any) -> float:
    """Time to the first token of a worker, without a Processor."""
    request = decode_pb2.DecodeRequest(
        start=generation_pb2.StartGeneration(
            slot=0, token_ids=list(range(5, 25)), sampling=sampling(1)
        )
    )
    began = time.perf_counter()
    call = stub.Decode()
    await call.write(request)
    await call.read()
    took_s = time.perf_counter() - began
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
    return took_s


class _Counter:
    """A sink that only counts: the Processor's end of the internal stream and nothing else."""

    def __init__(self) -> None:
        self.tokens = 0
        self.ended = asyncio.get_running_loop().create_future()

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        self.tokens += len(token_ids)

    def finish(self, finish: Finish) -> None:
        self.ended.set_result(None)

    def fail(self, error: ServingError) -> None:
        self.ended.set_exception(error)


async def hop(worker: ServiceProcess, streams: int, tokens: int) -> float:
    """CPU µs per token of the Processor's end of the internal stream, measured in this process."""
    router = Router(lambda: make_policy(PolicyName.LEAST_LOADED))
    fleet = Fleet(StaticDiscovery([worker.address]), router)
    fleet.open()
    while not router.ready("tiny"):
        await asyncio.sleep(0.01)
    request = RoutingRequest(model="tiny")
    start = GenerationRequest(
        request_id="hop",
        prompt=Prompt(list(range(5, 25))),
        sampling=Sampling(max_new_tokens=tokens, ignore_eos=True),
    )
    sinks = [_Counter() for _ in range(streams)]
    before = cpu_s(os.getpid())
    for sink in sinks:
        for leg in router.plan(request).legs:
            fleet.generate(leg.place.worker.address, start, sink)
    await asyncio.gather(*(sink.ended for sink in sinks))
    spent_s = cpu_s(os.getpid()) - before
    await fleet.close()
    return spent_s / sum(sink.tokens for sink in sinks) * 1e6


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a row measures."""

    streams: int
    step_ms: float
    connections: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.streams} streams, {self.step_ms:g} ms, {self.connections} connections"


async def measure(worker: ServiceProcess, processor: ServiceProcess, load: Load) -> Row:
    """One row: warm up, latency, then throughput and cost."""
    streams = load.streams
    tokens = tokens_each(streams, load.step_ms, load.seconds)
    async with stubs_for(processor, streams, load.connections) as stubs:
        await asyncio.gather(*(chat(stubs[i % len(stubs)], 32) for i in range(streams)))
        async with grpc.aio.insecure_channel(worker.address) as channel:
            decode = decode_pb2_grpc.DecodeServiceStub(channel)
            direct_s = [await direct(decode) for _ in range(_TTFT_CALLS)]
        calls = _TTFT_CALLS if streams == 1 else 0
        alone = [(await chat(stubs[0], 1)).ttft_s for _ in range(calls)]
        spent = await spend(stubs, worker, processor, streams, tokens)
        hop_us = await hop(worker, streams, min(tokens, 2000))
    answers, total = spent.answers, spent.tokens
    ttft = sorted(alone or [answer.ttft_s for answer in answers])
    return Row(
        streams=streams,
        step_ms=load.step_ms,
        connections=len(stubs),
        worker_us_per_token=spent.worker_us_per_token,
        processor_us_per_token=spent.processor_us_per_token,
        hop_us_per_token=hop_us,
        tokens_per_s=total / spent.took_s,
        ttft_ms_p50=statistics.median(ttft) * 1e3,
        ttft_ms_p99=ttft[int(len(ttft) * 0.99)] * 1e3,
        direct_ttft_ms_p50=statistics.median(direct_s) * 1e3,
        tokens_per_message=total / sum(answer.messages for answer in answers),
        longest_pacing_ms=max(answer.longest_pacing_s for answer in answers) * 1e3,
        worker_rss_mb=rss_mb(worker.pid),
        processor_rss_mb=rss_mb(processor.pid),
        client_us_per_token=spent.client_s / total * 1e6,
    )


def loads_of(arguments: argparse.Namespace) -> list[Load]:
    """List what is measured: by default one row has a connection for each stream."""
    seconds, wanted = arguments.seconds, arguments.connections
    pairs = [(step, n) for step in arguments.steps_ms for n in arguments.streams]
    few = [
        Load(streams=n, step_ms=step, connections=FEW_CONNECTIONS, seconds=seconds)
        for step, n in pairs
        if wanted != "each"
    ]
    each = [
        Load(streams=n, step_ms=step, connections=n, seconds=seconds)
        for step, n in pairs
        if wanted == "each" or (wanted == "both" and (step, n) == _EACH)
    ]
    return few + each


@dataclass(frozen=True)
class Run:
    """Measures loads, each on freshly started processes."""

    arguments: argparse.Namespace
    model: Path
    log: Path

    def row(self, load: Load, checkout: Path | None = None) -> Row:
        """Measure one load on the services of a checkout."""
        flags = {"max_pace_s": self.arguments.max_pace_s}
        env = environment_of(checkout)
        pair = services(self.model, self.log, load.step_ms, env=env, processor_flags=flags)
        with running(*pair):
            row: Row = uvloop.run(measure(*pair, load))
        return row

    def rows(self) -> list[Row]:
        """Measure all loads in each round."""
        rows = []
        for load in loads_of(self.arguments) * rounds_of(self.arguments):
            rows.append(self.row(load))
            sys.stderr.write(f"{load}: done\n")
        return rows

    def figures(self, load: Load, checkout: Path) -> Figures:
        """Return what of a row is the checkout's."""
        row = asdict(self.row(load, checkout))
        return {name: row[name] for name in _COMPARED}


_COMPARED = (
    "processor_us_per_token",
    "worker_us_per_token",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "processor_rss_mb",
)


def table(rows: Sequence[Row]) -> str:
    """Lay the rows out for people."""
    head = [
        ("streams", "streams", "{:d}"),
        ("step_ms", "step ms", "{:g}"),
        ("connections", "connections", "{:d}"),
        ("worker_us_per_token", "worker µs/tok", "{:.2f}"),
        ("processor_us_per_token", "processor µs/tok", "{:.2f}"),
        ("hop_us_per_token", "hop µs/tok", "{:.2f}"),
        ("tokens_per_s", "tok/s", "{:,.0f}"),
        ("tokens_per_message", "tok/msg", "{:.1f}"),
        ("longest_pacing_ms", "pacing ms", "{:.1f}"),
        ("ttft_ms_p50", "TTFT p50 ms", "{:.2f}"),
        ("ttft_ms_p99", "p99", "{:.2f}"),
        ("direct_ttft_ms_p50", "direct p50", "{:.2f}"),
        ("worker_rss_mb", "worker MB", "{:.0f}"),
        ("processor_rss_mb", "processor MB", "{:.0f}"),
    ]
    lines = [[title for _, title, _ in head]]
    lines += [[form.format(getattr(row, name)) for name, _, form in head] for row in rows]
    return laid_out(lines)


def main() -> int:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.stream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--streams", type=_ints, default=[1, 64, 256], help="at once (1,64,256)")
    parser.add_argument(
        "--steps-ms", type=_floats, default=[0, 10], help="engine step times; 0: unbounded (0,10)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="about how long a row takes (5)")
    parser.add_argument(
        "--connections",
        choices=("few", "each", "both"),
        default="both",
        help="of the clients: a few, one for each stream, or a few and one more row of 64 streams, "
        "10 ms with one for each (both)",
    )
    parser.add_argument("--max-pace-s", type=float, help="of the Processor; 0: no gathering")
    add_arguments(parser, figures="processor_us_per_token,worker_us_per_token")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(arguments, make_random_model(Path(folder, "tiny")), Path(folder, "services.log"))
        if arguments.against:
            rows = {str(load): partial(run.figures, load) for load in loads_of(arguments)}
            return compare(rows, arguments, as_json=arguments.json)
        measured = run.rows()
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in measured]}))  # noqa: T201
    else:
        print(table(measured))  # noqa: T201
    return 0


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
