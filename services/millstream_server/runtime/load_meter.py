"""What load reports say: requests and errors per second, CPU, memory, the service's own load."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from millstream_server.runtime.orca import LoadSnapshot

_SLOT_S = 0.5
_LEAST_UTILIZATION = 0.01
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """What the process used so far and may use. Children, such as engines, don't count."""

    cpu_s: Callable[[], float]
    """CPU seconds since some start."""
    memory_bytes: Callable[[], int]
    """Resident memory; 0 where the system doesn't tell."""
    cores: float
    memory_limit_bytes: int

    @classmethod
    def of_this(cls) -> ProcessUse:
        """Measure this process against its container's limits or, without any, the machine's."""
        return cls(
            cpu_s=time.process_time,
            memory_bytes=_resident_bytes,
            cores=cores_available(),
            memory_limit_bytes=memory_limit_bytes(),
        )


@dataclass(slots=True)
class _Slot:
    number: int
    finished: int = 0
    failed: int = 0


class LoadMeter:
    """Counts requests as they end; `read` makes of it what load reports say.

    All calls come from one event loop. `finished` costs under a microsecond, `read` some forty.
    """

    def __init__(
        self,
        utilization: Callable[[], float],
        *,
        named: Callable[[], Mapping[str, float]] = dict,
        window_s: float = 5.0,
        process: ProcessUse | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the share of its capacity that the service says is in use, and its own numbers.

        ``utilization`` may exceed 1 while requests queue. Rates are over the last ``window_s``.
        """
        self._utilization = utilization
        self._named = named
        self._window_s = window_s
        self._process = process or ProcessUse.of_this()
        self._clock = clock
        self._started_at = clock()
        self._slots: deque[_Slot] = deque()
        self._cpu_samples = deque([(self._started_at, self._process.cpu_s())])

    def finished(self, *, failed: bool = False) -> None:
        """Count a request that ended; ``failed`` if the server is to blame."""
        number = int(self._clock() / _SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            self._forget(number)
            self._slots.append(_Slot(number))
        self._slots[-1].finished += 1
        self._slots[-1].failed += failed

    def read(self) -> LoadSnapshot:
        """Say how loaded the process is.

        A utilization of 0 is reported as 1 %: clients take 0 for unknown, and the idle server's
        CPU for its load.
        """
        now = self._clock()
        since = self._forget(int(now / _SLOT_S)) * _SLOT_S
        over_s = min(now - since, max(now - self._started_at, 1.0))
        limit = self._process.memory_limit_bytes
        return LoadSnapshot(
            application_utilization=max(self._utilization(), _LEAST_UTILIZATION),
            cpu_utilization=self._cpu_share(now),
            mem_utilization=min(self._process.memory_bytes() / limit, 1.0) if limit else 0.0,
            rps=sum(slot.finished for slot in self._slots) / over_s,
            eps=sum(slot.failed for slot in self._slots) / over_s,
            named_metrics=dict(self._named()),
        )

    def _forget(self, number: int) -> int:
        """Drop what is older than the window that ends in slot ``number``; answer its first."""
        first = number - round(self._window_s / _SLOT_S) + 1
        while self._slots and self._slots[0].number < first:
            self._slots.popleft()
        return first

    def _cpu_share(self, now: float) -> float:
        """Compare with the oldest reading inside the window or, after a pause, the last one."""
        samples = self._cpu_samples
        while len(samples) > 1 and samples[0][0] < now - self._window_s:
            samples.popleft()
        then, used_s = samples[0]
        total_s = self._process.cpu_s()
        samples.append((now, total_s))
        if now <= then:
            return 0.0
        return (total_s - used_s) / (now - then) / self._process.cores


def cores_available(cgroup: Path = _CGROUP) -> float:
    """Count the cores this process may use: a container's quota, if less than what it sees."""
    seen = (
        len(os.sched_getaffinity(0))
        if sys.platform == "linux"  # Elsewhere a process can't be told to keep to some.
        else os.cpu_count() or 1
    )
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return min(seen, int(quota) / int(period))
    except (OSError, ValueError):  # No cgroup v2, or "max".
        return seen


def memory_limit_bytes(cgroup: Path = _CGROUP) -> int:
    """Answer what this process may take: a container's limit, or the machine's memory."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):  # No cgroup v2, or "max".
        return machine


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:  # Not Linux.
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
