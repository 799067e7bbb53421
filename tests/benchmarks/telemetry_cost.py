"""What metrics and tracing add to the cost of a token.

    python -m tests.benchmarks.telemetry_cost                     # about six minutes
    python -m tests.benchmarks.telemetry_cost --rounds 9 --json
    python -m tests.benchmarks.telemetry_cost --checkout ../before --modes checkout,off

A worker and a Processor answer the chats of the stream benchmark, started afresh for each figure,
in turns: one round has every mode once, in an order that rotates, so that a host that is slow for
a minute is slow for all. Modes:

    off       no metrics endpoint, no tracing
    metrics   the endpoint, scraped at once and then every 5 seconds
    tracing   that, and every request traced to a collector in a process of its own
    checkout  the services of another checkout (--checkout DIR), with no telemetry flag at all: what
              a token cost before telemetry was built in

CPU per token is Processor and worker together. Loads are long answers as fast as they come, long
ones at 10 ms a token, and short ones at that pace, where what a request costs counts for more.
Checked, for each load: metrics and tracing cost less than 15 % more than off; for long answers, off
costs at most 10 % more than the checkout (short ones show what else a request has come to cost).
Either is broken when both the median over rounds, each compared with its own round, and the
cheapest rounds say so. Both were really on: the endpoint gave series and the collector got spans.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from tests.benchmarks.against import environment_of, spread
from tests.benchmarks.token_cost import Spent, chat, services, spend, stubs_for, tokens_each
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.models.models import make_random_model
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running

_OFF, _METRICS, _TRACING, _CHECKOUT = "off", "metrics", "tracing", "checkout"
_SCRAPE_S = 5.0
_LIMIT = 1.15
_NOTHING = 1.1
"""What is less can't be told from nothing on a machine that others use too: metrics, which do more,
have come out below off by as much."""
_ENDPOINT = "http://127.0.0.1"


@dataclass(frozen=True)
class Load:
    """Chats at once, the engine's pace, the answers' length (None: as long as there is time)."""

    streams: int
    step_ms: float
    tokens: int | None = None

    def __str__(self) -> str:
        length = f", {self.tokens} tokens each" if self.tokens else ""
        return f"{self.streams} streams, step {self.step_ms:g} ms{length}"


_LOADS = (Load(256, 0.0), Load(64, 10.0), Load(64, 10.0, 40))
_LONG = {str(load) for load in _LOADS if load.tokens is None}


@dataclass(frozen=True)
class Figure:
    """CPU µs per token."""

    worker: float
    processor: float

    @property
    def total(self) -> float:
        return self.worker + self.processor


@dataclass
class TelemetryCost:
    """One run."""

    arguments: argparse.Namespace
    folder: Path
    modes: Sequence[str]
    verdict: Verdict = field(default_factory=Verdict)
    figures: dict[tuple[str, str], list[Figure]] = field(default_factory=dict)
    """By load and mode, in order of rounds."""
    scraped: int = 0
    spans: int = 0

    def run(self) -> Verdict:
        """Measure every round, compare."""
        model = make_random_model(self.folder / "tiny")
        for turn in range(self.arguments.rounds):
            shift = turn % len(self.modes)
            order = [*self.modes[shift:], *self.modes[:shift]]
            for load, mode in itertools.product(_LOADS, order):
                figure = self._figure(model, mode, load)
                self.figures.setdefault((str(load), mode), []).append(figure)
                progress(
                    f"round {turn + 1}, {load}, {mode}: "
                    f"worker {figure.worker:.2f}, processor {figure.processor:.2f} µs per token"
                )
        self._report()
        return self.verdict

    def _figure(self, model: Path, mode: str, load: Load) -> Figure:
        sink = ServiceProcess(
            "tests.benchmarks.otlp_sink", {"metrics_listen": None}, self.folder / "sink.log"
        )
        ports = (free_port(), free_port()) if mode in (_METRICS, _TRACING) else ()
        worker, processor = services(
            model,
            self.folder / "services.log",
            load.step_ms,
            self._flags(mode, sink),
            self._env(mode),
        )
        for service, port in zip((worker, processor), ports, strict=False):
            service.flags = {**service.flags, "metrics_listen": f"127.0.0.1:{port}"}
        with running(*([sink] if mode == _TRACING else []), worker, processor):
            spent: Spent = uvloop.run(self._spend(worker, processor, load, ports))
        if mode == _TRACING:
            self.spans += int(sink.log.read_text().rpartition("spans=")[2] or 0)
        return Figure(spent.worker_us_per_token, spent.processor_us_per_token)

    def _flags(self, mode: str, sink: ServiceProcess) -> Mapping[str, object]:
        if mode == _CHECKOUT:
            return {"metrics_listen": None}
        if mode == _TRACING:
            return {"otlp_endpoint": f"http://{sink.address}", "trace_sample_ratio": 1.0}
        return {"otlp_endpoint": ""}

    def _env(self, mode: str) -> Mapping[str, str]:
        return environment_of(self.arguments.checkout if mode == _CHECKOUT else None)

    async def _spend(
        self,
        worker: ServiceProcess,
        processor: ServiceProcess,
        load: Load,
        ports: Sequence[int],
    ) -> Spent:
        streams = load.streams
        most = tokens_each(streams, load.step_ms, self.arguments.seconds)
        tokens = load.tokens or most
        async with stubs_for(processor, streams) as stubs:
            await asyncio.gather(*(chat(stubs[i % len(stubs)], 32) for i in range(streams)))
            async with self._scraping(ports):
                return await spend(stubs, worker, processor, streams, tokens, times=most // tokens)

    @contextlib.asynccontextmanager
    async def _scraping(self, ports: Sequence[int]) -> AsyncIterator[None]:
        """Read all metrics at once and then every few seconds, as Prometheus does."""

        async def forever() -> None:
            while True:
                for port in ports:
                    text = await asyncio.to_thread(_read, f"{_ENDPOINT}:{port}/metrics")
                    self.scraped += text.count(b"\n")
                await asyncio.sleep(_SCRAPE_S)

        task = asyncio.ensure_future(forever())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    # ---- comparison ------------------------------------------------------------------------------

    def _report(self) -> None:
        measured = self.verdict.measured
        for (load, mode), figures in self.figures.items():
            measured.setdefault(load, {})[mode] = _summary(figures)
        for load in {load for load, _ in self.figures}:
            self._compare(load)
        measured["metric_lines_scraped"], measured["spans_collected"] = self.scraped, self.spans
        if {_METRICS, _TRACING} & {*self.modes}:
            self.verdict.expect(self.scraped, "no metrics were on: the endpoint gave nothing")
        if _TRACING in self.modes:
            self.verdict.expect(self.spans, "no tracing was on: the collector got no span")

    def _compare(self, load: str) -> None:
        totals = {
            mode: [figure.total for figure in self.figures[load, mode]] for mode in self.modes
        }
        off = totals.get(_OFF)
        if off is None:
            return
        ratios: dict[str, Any] = self.verdict.measured.setdefault(f"{load}, times off", {})
        for mode in self.modes:
            if mode == _OFF:
                continue
            paired = statistics.median(t / o for t, o in zip(totals[mode], off, strict=True))
            cheapest = min(totals[mode]) / min(off)
            ratios[mode] = {"median_of_rounds": paired, "cheapest_rounds": cheapest}
            times = min(paired, cheapest)
            if mode != _CHECKOUT:
                self.verdict.expect(
                    times < _LIMIT, f"{load}: {mode} costs {times:.2f} times what off costs"
                )
        before = ratios.get(_CHECKOUT)
        if before and load in _LONG:
            times = 1 / max(before.values())
            self.verdict.expect(
                times <= _NOTHING, f"{load}: off costs {times:.2f} times what the checkout costs"
            )


def _read(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own endpoint
            return bytes(answer.read())
    except OSError:
        return b""


def _summary(figures: Sequence[Figure]) -> dict[str, Any]:
    return {
        name: spread(values)
        for name, values in {
            "worker": [figure.worker for figure in figures],
            "processor": [figure.processor for figure in figures],
            "both": [figure.total for figure in figures],
        }.items()
    }


def main() -> int:
    """Parse arguments, measure, report."""
    parser = parser_of("telemetry_cost", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (3)")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="about how long a figure takes (8)"
    )
    parser.add_argument("--modes", default="", help="some of the modes, comma-separated")
    parser.add_argument("--checkout", type=Path, help="directory of another checkout to compare")
    arguments = parser.parse_args()
    modes = [_OFF, _METRICS, _TRACING] + ([_CHECKOUT] if arguments.checkout else [])
    if arguments.modes:
        asked = arguments.modes.split(",")
        if unknown := {*asked} - {*modes}:
            parser.error(f"--modes: {', '.join(sorted(unknown))}: not one of {', '.join(modes)}")
        modes = asked
    with folder_for(arguments) as folder:
        verdict = TelemetryCost(arguments, folder, modes).run()
    return verdict.conclude(as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
