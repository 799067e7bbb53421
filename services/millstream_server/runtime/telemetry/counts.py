"""What a process counts of its work: requests and calls, how they ended, and how loaded it is."""

from __future__ import annotations

import enum
import functools
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import prometheus_client
from prometheus_client import Histogram

from millstream_server.runtime.telemetry import metrics

_OPEN: Counter[str] = Counter()
"""Open requests of the process, by role."""


class Method:
    """What all calls of one method share."""

    def __init__(self, full_name: str, durations: Histogram) -> None:
        """Observe into ``durations``; the name may begin with a slash, as on the wire."""
        self.name = full_name.lstrip("/")
        self.attributes = {"rpc.system.name": "grpc", "rpc.method": self.name}
        self._durations = durations
        self._by_code: dict[enum.Enum, Histogram] = {}

    def observe(self, code: enum.Enum, seconds: float) -> None:
        """Count a call that ended with ``code``, ours or grpcio's."""
        child = self._by_code.get(code)
        if child is None:
            child = self._by_code[code] = self._durations.labels("grpc", self.name, code.name)
        child.observe(seconds)


class RequestCounts:
    """Requests on the worker streams of one role, at either end, with the labels set."""

    def __init__(self, role: str) -> None:
        self._role = role
        # Read at each scrape, which is cheaper than to set the gauge at every request.
        metrics.STREAM_REQUESTS_OPEN.labels(role).set_function(lambda: _OPEN[role])
        self._outcomes: dict[str, prometheus_client.Counter] = {}

    def begun(self) -> None:
        _OPEN[self._role] += 1

    def ended(self, outcome: str) -> None:
        """Count a request as ended; ``outcome`` is its finish reason or its failure's reason."""
        _OPEN[self._role] -= 1
        child = self._outcomes.get(outcome)
        if child is None:
            child = self._outcomes[outcome] = metrics.STREAM_REQUESTS.labels(self._role, outcome)
        child.inc()


class StreamMetrics(RequestCounts):
    """Those of text requests, and their frames; recorded per frame and request, not per token."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self._frames = metrics.STREAM_FRAMES.labels(role)
        self._tokens = metrics.STREAM_TOKENS.labels(role)

    def frame(self, tokens: int) -> None:
        self._frames.inc()
        self._tokens.inc(tokens)


@functools.cache
def stream_metrics(role: str) -> StreamMetrics:
    """Return a role's metrics."""
    return StreamMetrics(role)


# ---- load ----------------------------------------------------------------------------------------

_PERIOD_S = 0.5
_WINDOW_S = 5.0
"""Rates are over so long."""
_LEAST_UTILIZATION = 0.01
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """How loaded the process is now. Shares are relative to its limits; 0 means unknown."""

    application_utilization: float = 0.0
    """Open work divided by the work it can do at once; above 1 while requests queue."""
    cpu_utilization: float = 0.0
    mem_utilization: float = 0.0
    rps: float = 0.0
    """Requests that ended, per second."""
    eps: float = 0.0
    """Those of them that failed by the server's fault, per second."""
    named: Mapping[str, float] = field(default_factory=dict)
    """What the process reports besides, on streams of reports only."""


LoadSource = Callable[[], LoadSnapshot]
"""Returns the current load, at once; called up to ten times a second by each reporter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """What the process has used and may use. Child processes, such as engines, don't count."""

    cpu_s: Callable[[], float]
    """CPU seconds since a fixed moment."""
    memory_bytes: Callable[[], int]
    """Resident memory; 0 where the system doesn't report it."""
    cores: float
    memory_limit_bytes: int

    @classmethod
    def of_this(cls) -> ProcessUse:
        """Measure this process; limits are the container's or, without any, the machine's."""
        return cls(
            cpu_s=time.process_time,
            memory_bytes=resident_bytes,
            cores=cores_available(),
            memory_limit_bytes=memory_limit_bytes(),
        )


@dataclass(slots=True)
class _Period:
    number: int
    finished: int = 0
    failed: int = 0


class LoadMeter:
    """Counts requests as they end; `read` returns the load.

    All calls come from one event loop. `finished` takes less than a microsecond, `read` about 40.
    """

    def __init__(
        self,
        utilization: Callable[[], float],
        *,
        named: Callable[[], Mapping[str, float]] = dict,
        process: ProcessUse | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``utilization`` returns the share of capacity in use, above 1 while requests queue.

        ``named`` returns `LoadSnapshot.named`.
        """
        self._utilization = utilization
        self._named = named
        self._process = process or ProcessUse.of_this()
        self._clock = clock
        self._started_at = clock()
        self._periods: deque[_Period] = deque()
        self._cpu_samples = deque([(self._started_at, self._process.cpu_s())])

    def finished(self, *, failed: bool = False) -> None:
        """Count a request that ended; ``failed`` if by the server's fault."""
        number = int(self._clock() / _PERIOD_S)
        if not self._periods or self._periods[-1].number != number:
            self._forget(number)
            self._periods.append(_Period(number))
        self._periods[-1].finished += 1
        self._periods[-1].failed += failed

    def read(self) -> LoadSnapshot:
        """Return how loaded the process is.

        A utilization of 0 is reported as 1 %: clients take 0 for unknown and use the CPU's share
        instead.
        """
        now = self._clock()
        since = self._forget(int(now / _PERIOD_S)) * _PERIOD_S
        over_s = min(now - since, max(now - self._started_at, 1.0))
        limit = self._process.memory_limit_bytes
        return LoadSnapshot(
            application_utilization=max(self._utilization(), _LEAST_UTILIZATION),
            cpu_utilization=self._cpu_share(now),
            mem_utilization=min(self._process.memory_bytes() / limit, 1.0) if limit else 0.0,
            rps=sum(period.finished for period in self._periods) / over_s,
            eps=sum(period.failed for period in self._periods) / over_s,
            named=self._named(),
        )

    def _forget(self, number: int) -> int:
        """Drop periods before the window that ends in period ``number``; return its first."""
        first = number - round(_WINDOW_S / _PERIOD_S) + 1
        while self._periods and self._periods[0].number < first:
            self._periods.popleft()
        return first

    def _cpu_share(self, now: float) -> float:
        """Return the CPU share since the window's oldest reading or, after a pause, the last."""
        samples = self._cpu_samples
        while len(samples) > 1 and samples[0][0] < now - _WINDOW_S:
            samples.popleft()
        then, used_s = samples[0]
        total_s = self._process.cpu_s()
        samples.append((now, total_s))
        if now <= then:
            return 0.0
        return (total_s - used_s) / (now - then) / self._process.cores


def cores_available(cgroup: Path = _CGROUP) -> float:
    """Count the cores this process may use: the container's quota, if lower than the machine's."""
    seen = (
        len(os.sched_getaffinity(0))
        if sys.platform == "linux"  # elsewhere a process can't be limited to some cores
        else os.cpu_count() or 1
    )
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return min(seen, int(quota) / int(period))
    except (OSError, ValueError):  # No cgroup v2, or "max".
        return seen


def memory_limit_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the memory this process may use: the container's limit, or the machine's memory."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):  # No cgroup v2, or "max".
        return machine


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return this process' resident memory; 0: not known."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:  # Not Linux.
        return 0
    return pages * _PAGE_BYTES
