"""What a service process takes, as the kernel counts it, and what it complains of in its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ESTABLISHED = "01"
_COMPLAINTS = re.compile(
    r"Task exception was never retrieved|Future exception was never retrieved"
    r"|Task was destroyed|was never awaited|Traceback|^\S+ \S+ (?:ERROR|CRITICAL) "
    r"|Unclosed|unclosed|Fatal Python error|Exception ignored|Check failed",
    re.MULTILINE,
)
# grpc.aio, when a client cancels in the moment in which the server writes: harmless, and not ours.
_EXCUSED = re.compile(
    r"^.*ExecuteBatchError raised in core by servicer method.*\n"
    r"(?:\s*(?:During handling.*\n\s*\n)?"
    r" *Traceback(?:.*\n)*? *grpc\._cython\.cygrpc\.ExecuteBatchError.*(?:\n|\Z))*",
    re.MULTILINE,
)
_SHOWN = 10
_MAX_DRIFT = 0.05


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 2**20


def clients_of(port: int) -> int:
    """Count the connections that a port of this machine has accepted and still holds."""
    wanted = f":{port:04X}"
    count = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            rows = [row.split() for row in Path(table).read_text().splitlines()[1:]]
            count += sum(row[1].endswith(wanted) and row[3] == _ESTABLISHED for row in rows)
    return count


@dataclass(frozen=True)
class Footprint:
    """What a process holds at one moment."""

    rss_mb: float
    files: int
    """Open files, sockets among them."""
    sockets: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Look at a living process."""
        links = []
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed while we looked
                links.append(str(entry.readlink()))
        return cls(
            rss_mb=rss_mb(pid),
            files=len(links),
            sockets=sum(link.startswith("socket:") for link in links),
            threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
        )

    def leaked(self, before: Footprint, slack: int) -> str:
        """Say what is held beyond ``before`` and a few more; empty when nothing is."""
        grown = {
            name: getattr(self, name) - getattr(before, name)
            for name in ("files", "sockets", "threads")
        }
        return ", ".join(f"{more} more {name}" for name, more in grown.items() if more > slack)


def complaints(log: str) -> list[str]:
    """Pick what a service in order never writes: one line of each kind, and how often it came."""
    lines = _EXCUSED.sub("", log).splitlines()
    found = [line.strip()[:300] for line in lines if _COMPLAINTS.search(line)]
    kinds = Counter(kind_of(line) for line in found)
    first = {kind_of(line): line for line in reversed(found)}
    return [f"{count} x {first[kind]}" for kind, count in kinds.most_common(_SHOWN)]


def kind_of(text: str) -> str:
    """Take the numbers and ids out of a text."""
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", text)


@dataclass(frozen=True)
class Growth:
    """How a process's memory went, once it was warm."""

    first_mb: float
    last_mb: float
    slope_mb_per_min: float
    """Of a straight line through the samples after the first third."""
    drift: float
    """What that line gains over the fitted time, as a share of the memory."""
    fitted_s: float

    @property
    def flat(self) -> bool:
        """Tell whether the line gains no more than a twentieth."""
        return self.drift <= _MAX_DRIFT

    def __str__(self) -> str:
        """Say it in a sentence's part."""
        return f"{self.slope_mb_per_min:.2f} MB/min, {self.drift:.1%} in {self.fitted_s:.0f} s"


@dataclass
class Sampler:
    """Memory and CPU of several processes, once a second."""

    pids: Mapping[str, Callable[[], int]]
    """Asked anew each time: a service may be restarted. One that isn't there is left out."""
    samples: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)
    _cpu: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def sample(self) -> None:
        """Look once."""
        for name, pid_of in self.pids.items():
            with contextlib.suppress(OSError, IndexError):  # it is just being restarted
                pid = pid_of()
                at = time.monotonic() - self._began
                self.samples.setdefault((name, pid), []).append((at, rss_mb(pid)))
                spent_s = cpu_s(pid)
                first_s, _ = self._cpu.setdefault((name, pid), (spent_s, spent_s))
                self._cpu[name, pid] = (first_s, spent_s)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sample while the block runs."""

        async def forever() -> None:
            while True:
                self.sample()
                await asyncio.sleep(1.0)

        task = asyncio.ensure_future(forever())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            self.sample()

    def growth(self, name: str) -> Growth | None:
        """Fit the longest-lived incarnation of ``name``; None when it lived too briefly."""
        lives = [s for (owner, _), s in self.samples.items() if owner == name]
        samples = max(lives, key=len, default=[])
        warm = samples[len(samples) // 3 :]
        if len(warm) < 3:
            return None
        slope, _ = statistics.linear_regression(*zip(*warm, strict=True))
        fitted_s = warm[-1][0] - warm[0][0]
        mean = statistics.fmean(mb for _, mb in warm)
        return Growth(samples[0][1], samples[-1][1], slope * 60, slope * fitted_s / mean, fitted_s)

    def cores(self) -> dict[str, float]:
        """How many cores each kept busy on average, all incarnations together."""
        took_s = time.monotonic() - self._began
        total: dict[str, float] = {}
        for (name, _), (first_s, last_s) in self._cpu.items():
            total[name] = total.get(name, 0.0) + (last_s - first_s) / took_s
        return total
