"""What metrics and tracing add to the cost of a token.

    python -m tests.benchmarks.telemetry_cost                     # about five minutes
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

CPU per token is Processor and worker together. Checked, over all loads: metrics and tracing cost
less than 15 % more than off (the median over rounds, each compared with its own round); the median
of off is no dearer than the dearest round of the checkout. Both were really on: the endpoint gave
series and the collector got spans.
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

from tests.support.models import make_random_model
from tests.support.suite import ServiceProcess, free_port, running
from tests.support.token_cost import Spent, chat, services, spend, stubs_for, tokens_each
from tests.support.verdict import Verdict, folder_for, parser_of, progress

_OFF, _METRICS, _TRACING, _CHECKOUT = "off", "metrics", "tracing", "checkout"
_LOADS = ((256, 0.0), (64, 10.0))
"""Streams, and the engine's step in ms."""
_SCRAPE_S = 5.0
_LIMIT = 1.15
_ENDPOINT = "http://127.0.0.1"


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
            for (streams, step_ms), mode in itertools.product(_LOADS, order):
                figure = self._figure(model, mode, streams, step_ms)
                load = f"{streams} streams, step {step_ms:g} ms"
                self.figures.setdefault((load, mode), []).append(figure)
                progress(
                    f"round {turn + 1}, {load}, {mode}: "
                    f"worker {figure.worker:.2f}, processor {figure.processor:.2f} µs per token"
                )
        self._report()
        return self.verdict

    def _figure(self, model: Path, mode: str, streams: int, step_ms: float) -> Figure:
        sink = ServiceProcess(
            "tests.support.otlp_sink", {"metrics_listen": None}, self.folder / "sink.log"
        )
        ports = (free_port(), free_port()) if mode in (_METRICS, _TRACING) else ()
        worker, processor = services(
            model, self.folder / "services.log", step_ms, self._flags(mode, sink), self._env(mode)
        )
        for service, port in zip((worker, processor), ports, strict=False):
            service.flags = {**service.flags, "metrics_listen": f"127.0.0.1:{port}"}
        with running(*([sink] if mode == _TRACING else []), worker, processor):
            spent: Spent = uvloop.run(self._spend(worker, processor, streams, step_ms, ports))
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
        if mode != _CHECKOUT:
            return {}
        roots = [self.arguments.checkout / part for part in ("services", "generated/python")]
        return {"PYTHONPATH": ":".join(str(root.resolve(strict=True)) for root in roots)}

    async def _spend(
        self,
        worker: ServiceProcess,
        processor: ServiceProcess,
        streams: int,
        step_ms: float,
        ports: Sequence[int],
    ) -> Spent:
        async with stubs_for(processor, streams) as stubs:
            await asyncio.gather(*(chat(stubs[i % len(stubs)], 32) for i in range(streams)))
            async with self._scraping(ports):
                tokens = tokens_each(streams, step_ms, self.arguments.seconds)
                return await spend(stubs, worker, processor, streams, tokens)

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
            if mode != _CHECKOUT:
                self.verdict.expect(
                    paired < _LIMIT, f"{load}: {mode} costs {paired:.2f} times what off costs"
                )
        if before := totals.get(_CHECKOUT):
            median, dearest = statistics.median(off), max(before)
            self.verdict.expect(
                median <= dearest,
                f"{load}: off costs {median:.2f} µs per token, the checkout at most {dearest:.2f}",
            )


def _read(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own endpoint
            return bytes(answer.read())
    except OSError:
        return b""


def _summary(figures: Sequence[Figure]) -> dict[str, Any]:
    return {
        name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
        for name, values in {
            "worker": [figure.worker for figure in figures],
            "processor": [figure.processor for figure in figures],
            "both": [figure.total for figure in figures],
        }.items()
    }


def main() -> int:
    """Parse arguments, measure, report."""
    parser = parser_of("telemetry_cost", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (5)")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="about how long a figure takes (4)"
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
