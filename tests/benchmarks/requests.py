"""What a request costs on its way: client → Processor → workers, each its own process, on loopback.

    python -m tests.benchmarks.requests                     # a table, about two minutes
    python -m tests.benchmarks.requests --cases chats --topologies aggregated --json
    python -m tests.benchmarks.requests --against ../before --rounds 7    # ratios, in pairs

The services have simulated engines and the settings of `millstream up`: metrics, admin port, a log
line for each request. Both topologies: a Processor with one aggregated worker, or with a prefill
and a decode worker. The client is plain gRPC (tests/support/benchmarks/chat_load.py), one process;
each chat is one message and a half-close. Services are started afresh for each figure. Cases:

    chats        64 chats at once, each that ends followed by the next; 2 tokens, engine unbounded
    chats-10ms   the same with 1 token from an engine with steps of 10 ms
    burst        256 chats start at once, 32 tokens each, steps of 10 ms
    starvation   64 endless answers of an unbounded engine; meanwhile 4 short chats at a time
    one-stream   one chat of 1 token at a time; each followed by a Decode call at an aggregated
                 worker, without a Processor: the difference of the two medians is "above"
    bare         64 streams at once to a grpc.aio server that does nothing: the yardstick

CPU per chat is what the kernel charged to a process, user and system, divided by the chats. "busy"
is the sum over all processes per second: at two cores' 2.0 the machine is the limit. TTFT is
measured by the client from its call to the first token.

With --against, each case but bare is compared with another checkout's, as
tests/benchmarks/against.py says: CPU per chat of each service is judged, the rest is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.against import (
    Figures,
    add_arguments,
    compare,
    environment_of,
    laid_out,
    rounds_of,
    spread,
)
from tests.support.benchmarks.chat_load import ChatLoad, Loaded
from tests.support.benchmarks.verdict import folder_for, parser_of, progress
from tests.support.models.models import VOCAB_SIZE, make_random_model
from tests.support.processes.ports import free_port
from tests.support.processes.processes import cpu_s, rss_mb
from tests.support.processes.suite import ServiceProcess, running

_AGGREGATED, _DISAGGREGATED = "aggregated", "disaggregated"
_WARM_UP = 0.2
"""Of the time that a case takes, before it is measured."""
_ENDLESS_TOKENS = 200_000
_CONTEXT_LENGTH = 262_144
_BURST_TOKENS = 32
_FEW, _FEW_PAUSE_S = 4, 0.05
_MANY = 64


@dataclass(frozen=True)
class Suite:
    """The services of one figure. ``outside`` serves no Processor: it is for direct calls."""

    services: dict[str, ServiceProcess]
    outside: ServiceProcess | None = None

    @property
    def door(self) -> str:
        return next(reversed(self.services.values())).address

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        extra = [self.outside] if self.outside else []
        with running(*extra, *self.services.values()):
            yield

    def cpu_s(self) -> dict[str, float]:
        return {name: cpu_s(service.pid) for name, service in self.services.items()}

    def figures(self, load: Callable[[], Loaded]) -> Figures:
        """Measure one load: CPU per chat of each process, and times."""
        before = self.cpu_s()
        loaded = load()
        spent = {name: s - before[name] for name, s in self.cpu_s().items()}
        spent["client"] = loaded.client_s
        figures = {f"{name}_ms_per_chat": s / loaded.chats * 1e3 for name, s in spent.items()}
        figures["chats_per_s"] = loaded.chats / loaded.took_s
        if "processor" in self.services:
            figures["processor_mb"] = rss_mb(self.services["processor"].pid)
        figures["busy_cores"] = sum(spent.values()) / loaded.took_s
        return figures | _times(loaded)


def _times(loaded: Loaded) -> Figures:
    ttft_ms = sorted(s * 1e3 for s in loaded.ttft_s)
    figures = {
        "ttft_ms_p50": statistics.median(ttft_ms),
        "ttft_ms_p99": ttft_ms[int(len(ttft_ms) * 0.99)],
    }
    if loaded.direct_ttft_s:
        figures["direct_ttft_ms_p50"] = statistics.median(loaded.direct_ttft_s) * 1e3
        figures["above_direct_ms"] = figures["ttft_ms_p50"] - figures["direct_ttft_ms_p50"]
    return figures


# ---- cases ---------------------------------------------------------------------------------------


def _chats(suite: Suite, seconds: float, tokens: int = 2) -> Figures:
    with ChatLoad(suite.door) as load:
        load.closed_loop(64, tokens, _WARM_UP * seconds)
        return suite.figures(lambda: load.closed_loop(64, tokens, seconds))


def _chats_of_one(suite: Suite, seconds: float) -> Figures:
    return _chats(suite, seconds, tokens=1)


def _burst(suite: Suite, seconds: float) -> Figures:
    with ChatLoad(suite.door) as load:
        load.bursts(256, _BURST_TOKENS, times=2)
        return suite.figures(lambda: load.bursts(256, _BURST_TOKENS, times=max(1, int(seconds))))


def _starvation(suite: Suite, seconds: float) -> Figures:
    with ChatLoad(suite.door) as many, ChatLoad(suite.door) as few:
        few.closed_loop(_FEW, 2, _WARM_UP * seconds)
        many.hold(_MANY, _ENDLESS_TOKENS)
        figures = _times(few.closed_loop(_FEW, 2, seconds, pause_s=_FEW_PAUSE_S))
        assert many.held() == _MANY, "a chat of the many failed"
        return figures


def _one_stream(suite: Suite, seconds: float) -> Figures:
    worker = suite.outside or next(iter(suite.services.values()))
    with ChatLoad(suite.door) as load:
        load.alternate(worker.address, times=50)
        return _times(load.alternate(worker.address, times=max(1, int(seconds * 100))))


def _bare(suite: Suite, seconds: float) -> Figures:
    with ChatLoad(suite.door) as load:
        load.echoes(64, _WARM_UP * seconds)
        return suite.figures(lambda: load.echoes(64, seconds))


@dataclass(frozen=True)
class Case:
    """What is measured, and the engine's step."""

    measure: Callable[[Suite, float], Figures]
    step_ms: float = 0.0


_BARE = "bare"
_CASES = {
    "chats": Case(_chats),
    "chats-10ms": Case(_chats_of_one, 10.0),
    "burst": Case(_burst, 10.0),
    "starvation": Case(_starvation),
    "one-stream": Case(_one_stream),
    _BARE: Case(_bare),
}


# ---- runs ----------------------------------------------------------------------------------------


@dataclass
class Run:
    """Every case on both topologies."""

    arguments: argparse.Namespace
    folder: Path
    rounds: dict[tuple[str, str], list[Figures]] = field(default_factory=dict)
    """By topology and case: one entry a round."""

    def measure(self) -> None:
        """Measure all rounds."""
        for turn in range(rounds_of(self.arguments)):
            for topology, case in self._wanted():
                figures = self.figures(topology, case)
                self.rounds.setdefault((topology, case), []).append(figures)
                progress(f"round {turn + 1}, {topology}, {case}: {_line(figures)}")

    def _wanted(self) -> list[tuple[str, str]]:
        cases = [case for case in self.arguments.cases if case != _BARE]
        bare = [("-", _BARE)] if _BARE in self.arguments.cases else []
        return [*itertools.product(self.arguments.topologies, cases), *bare]

    def figures(self, topology: str, case: str, checkout: Path | None = None) -> Figures:
        """Measure a case on the services of a checkout, started for it."""
        suite = self._suite(topology, case, checkout)
        with suite.running():
            return _CASES[case].measure(suite, self.arguments.seconds)

    def compare(self) -> int:
        """Measure each case here and in another checkout; returns the exit code."""
        rows = {
            f"{topology} {case}": partial(self._of_services, topology, case)
            for topology, case in self._wanted()
            if case != _BARE
        }
        return compare(rows, self.arguments, as_json=self.arguments.json)

    def _of_services(self, topology: str, case: str, checkout: Path) -> Figures:
        """Leave out what the client takes: it is this checkout's."""
        figures = self.figures(topology, case, checkout)
        return {name: value for name, value in figures.items() if not name.startswith("client")}

    def _suite(self, topology: str, case: str, checkout: Path | None) -> Suite:
        if case == _BARE:
            bare = ServiceProcess(
                "tests.support.benchmarks.bare_stream",
                {"metrics_listen": None},
                self.folder / "bare.log",
            )
            return Suite({_BARE: bare})
        model = make_random_model(self.folder / "tiny")
        start = _Starter(self.folder, model, _CASES[case].step_ms, checkout)
        if topology == _AGGREGATED:
            workers = {"decode": start.decode(_AGGREGATED)}
        else:
            workers = {"prefill": start.prefill(), "decode": start.decode(_DISAGGREGATED)}
        apart = case == "one-stream" and topology == _DISAGGREGATED
        return Suite(
            {**workers, "processor": start.processor(workers.values())},
            start.decode(_AGGREGATED) if apart else None,
        )

    def rows(self) -> list[dict[str, Any]]:
        """Sum all rounds up."""
        return [
            {"topology": topology, "case": case}
            | {name: spread([figures[name] for figures in rounds]) for name in rounds[0]}
            for (topology, case), rounds in self.rounds.items()
        ]


@dataclass
class _Starter:
    """Makes services with the flags that `millstream up --engine simulated` gives them."""

    folder: Path
    model: Path
    step_ms: float
    checkout: Path | None

    def processor(self, workers: Iterable[ServiceProcess]) -> ServiceProcess:
        flags = {
            "workers": ",".join(worker.address for worker in workers),
            "models": f"tiny={self.model}",
            "policy": "least_loaded",
        }
        return self._service("processor", flags)

    def prefill(self) -> ServiceProcess:
        return self._service("prefill", {**self._engine(), "bootstrap_port": free_port()})

    def decode(self, mode: str) -> ServiceProcess:
        return self._service("decode", {**self._engine(), "mode": mode})

    def _engine(self) -> dict[str, object]:
        return {
            "engine": "simulated",
            "model_path": self.model,
            "model_name": "tiny",
            "simulated_vocab_size": VOCAB_SIZE,
            "simulated_step_s": self.step_ms / 1000,
            "context_length": _CONTEXT_LENGTH,
        }

    def _service(self, role: str, flags: Mapping[str, object]) -> ServiceProcess:
        loopback = {
            "metrics_listen": f"127.0.0.1:{free_port()}",
            "admin_listen": f"127.0.0.1:{free_port()}",
            "log_format": "text",
        }
        log = self.folder / f"{role}.log"
        env = environment_of(self.checkout)
        return ServiceProcess(f"millstream_server.{role}", {**loopback, **flags}, log, env=env)


# ---- output --------------------------------------------------------------------------------------


def _line(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in figures.items())


_COLUMNS = {
    "chats_per_s": "chats/s",
    "busy_cores": "busy",
    "processor_ms_per_chat": "processor ms",
    "prefill_ms_per_chat": "prefill ms",
    "decode_ms_per_chat": "decode ms",
    "bare_ms_per_chat": "bare ms",
    "client_ms_per_chat": "client ms",
    "processor_mb": "processor MB",
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p99": "p99",
    "direct_ttft_ms_p50": "direct p50",
    "above_direct_ms": "above",
}


def _table(run: Run) -> str:
    """Lay out the medians of the rounds."""
    lines = [["topology", "case", *_COLUMNS.values()]]
    for row in run.rows():
        cells = [_cell(row.get(name)) for name in _COLUMNS]
        lines.append([row["topology"], row["case"], *cells])
    return laid_out(lines)


def _cell(values: Mapping[str, float] | None) -> str:
    if values is None:
        return ""
    return f"{values['median']:,.0f}" if values["median"] >= 100 else f"{values['median']:.2f}"


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        if unknown := {*text.split(",")} - {*known}:
            message = f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}"
            raise argparse.ArgumentTypeError(message)
        return text.split(",")

    return parse


def main() -> int:
    """Parse arguments, measure, print."""
    parser = parser_of("requests", __doc__)
    topologies = (_AGGREGATED, _DISAGGREGATED)
    parser.add_argument(
        "--topologies", type=_some_of(topologies), default=topologies, help="comma-separated"
    )
    parser.add_argument(
        "--cases", type=_some_of([*_CASES]), default=[*_CASES], help="comma-separated"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="about how long each takes (5)")
    add_arguments(parser, figures="*_ms_per_chat")
    arguments = parser.parse_args()
    with folder_for(arguments) as folder:
        run = Run(arguments, folder)
        if arguments.against:
            return run.compare()
        run.measure()
    print(json.dumps({"rows": run.rows()}) if arguments.json else _table(run))  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
