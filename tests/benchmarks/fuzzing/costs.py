"""What a reader takes for an input: calls, CPU time, memory.

It is measured in a child process, which is killed if it doesn't end.

The calls are counted by the interpreter's own profiler, so they are the same every time. CPU time
is the thread's, without garbage collections.
"""

from __future__ import annotations

import contextlib
import cProfile
import faulthandler
import functools
import gc
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.benchmarks.fuzzing.trees import Grammar

Read = Callable[[bytes], None]

_FORK = multiprocessing.get_context("fork")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = resource.getpagesize()
_MOST_RESIDENT = 3 << 30
"""A child that grows beyond is killed."""
_COUNTED_S = 0.25
"""What takes longer isn't read again to count its calls and its memory."""
_RECHECKS = 4
_OURS = "millstream_server"
_FRAME = re.compile(r'File "[^"]*/(?:millstream_server/)?([^"/]*/[^"/]+)", line (\d+) in (\S+)')
_BASE_RESIDENT = 8 << 20
"""What may be taken for any input."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a reader may take; about three times the most that ordinary inputs take."""

    calls: float
    """By byte."""
    us: float
    """CPU time by byte, in microseconds."""
    memory: float = 40.0
    """Bytes by byte."""
    memory_of: int = 1 << 30
    """So many bytes of the input count for that: the rest may not be kept."""
    total_s: float = 1.0
    """Of one input, also of the largest."""
    base_s: float = 5e-3
    """Of any input; by default one piece of the event loop."""
    base_calls: int = 20_000
    base_memory: int = 256 << 10
    exponent: float = 1.3
    """How cost grows with size: 1 is linear, 2 quadratic."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one input took."""

    size: int
    calls: int = 0
    cpu_s: float = 0.0
    memory: int = 0
    resident: int = 0
    where: str = ""
    """The function that took most."""
    problem: str = ""
    """Why there are no figures; or an error that isn't a refusal."""

    def loads(self, bound: Bound) -> dict[str, float]:
        """Return which share of each bound it takes; above 1 it is broken."""
        memory = bound.memory * min(self.size, bound.memory_of)
        return {
            "calls": self.calls / (bound.calls * self.size + bound.base_calls),
            "CPU": self.cpu_s / (bound.us * 1e-6 * self.size + bound.base_s),
            "CPU in all": self.cpu_s / bound.total_s,
            "memory": max(
                self.memory / (memory + bound.base_memory),
                self.resident / (memory + _BASE_RESIDENT),
            ),
        }

    def load(self, bound: Bound) -> float:
        return math.inf if self.problem else max(self.loads(bound).values())

    def __str__(self) -> str:
        """Say it for people."""
        if self.problem:
            return f"{self.size} bytes: {self.problem} ({self.where})"
        memory = max(self.memory, self.resident)
        return (
            f"{self.size} bytes: {self.calls} calls ({self.calls / self.size:.1f} a byte), "
            f"{self.cpu_s * 1e3:.1f} ms ({self.cpu_s / self.size * 1e6:.2f} us a byte), "
            f"memory {memory >> 10} KiB ({memory / self.size:.0f} x); most in {self.where}"
        )


@dataclass(frozen=True, kw_only=True)
class Reader:
    """What reads callers' bytes, and what it is tried with."""

    name: str
    of: str
    """Its modules, for people."""
    make: Callable[[], Read]
    """Return what reads; what it refuses ends it without an error."""
    grammar: Grammar
    bound: Bound
    sizes: tuple[int, ...] = (256, 4 << 10, 64 << 10)
    binary: bool = False
    """The grammar's characters are bytes."""
    resident: bool = False
    """Its memory isn't Python's: the process's resident set is measured."""

    def encoded(self, text: str) -> bytes:
        return text.encode("latin-1" if self.binary else "utf-8", "surrogatepass")

    def limit_s(self, size: int) -> float:
        """Return after which CPU time an input is given up: far above its bound."""
        return min(2 * self.bound.total_s, max(0.5, 8 * self.bound.us * 1e-6 * size))


# ---- in the child --------------------------------------------------------------------------------


def _caches() -> list[Any]:
    """Find what remembers inputs: those that are bounded by a number."""
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, functools._lru_cache_wrapper)
        and each.cache_parameters()["maxsize"] is not None
        and str(each.__module__).startswith(_OURS)
    ]


def _serve(read: Read, wire: Connection, stacks: int, resident: bool) -> None:  # noqa: FBT001
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    logging.disable()
    caches = _caches()
    gc.collect()
    gc.freeze()
    gc.disable()
    wire.send("ready")
    while True:
        data, runs = wire.recv()
        fresh: list[dict[str, Any]] = [_timed(read, data, caches, resident) for _ in range(runs)]
        first = min(fresh, key=lambda each: each["cpu_s"])
        wire.send(first)
        if first["cpu_s"] <= _COUNTED_S * runs:
            first |= _counted(read, data, caches)
        wire.send(first)
        gc.collect()


def _once(read: Read, data: bytes, caches: list[Any]) -> str:
    for cache in caches:
        cache.cache_clear()
    try:
        read(data)
    except Exception as error:  # noqa: BLE001 - the finding
        return _raised(error)
    return ""


def _raised(error: Exception) -> str:
    trace, where = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if _OURS in code.co_filename:
            where = f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return f"raised {type(error).__name__}: {str(error)[:100]} at {where}"


def _timed(read: Read, data: bytes, caches: list[Any], resident: bool) -> dict[str, Any]:  # noqa: FBT001
    before = 0
    if resident:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmHWM")
    began = time.thread_time()
    problem = _once(read, data, caches)
    cpu_s = time.thread_time() - began
    grown = _status("VmHWM") - before if resident else 0
    return {"cpu_s": cpu_s, "resident": grown, "problem": problem}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def _counted(read: Read, data: bytes, caches: list[Any]) -> dict[str, Any]:
    profile = cProfile.Profile()
    profile.enable()
    _once(read, data, caches)
    profile.disable()
    entries = profile.getstats()
    ours = [each for each in entries if _OURS in getattr(each.code, "co_filename", "")]
    most = max(ours, key=lambda each: each.inlinetime, default=None)
    code: Any = most and most.code
    tracemalloc.start()
    _once(read, data, caches)
    _, memory = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "calls": sum(each.callcount for each in entries),
        "memory": memory,
        "where": f"{Path(code.co_filename).name} {code.co_name}" if code else "",
    }


# ---- in the parent -------------------------------------------------------------------------------


@dataclass
class Gauge:
    """Measures one reader's inputs, in a child that is started again when it was killed."""

    reader: Reader
    _read: Any = None
    _child: Any = None
    _wire: Any = None
    _stacks: Any = field(default_factory=tempfile.TemporaryFile)

    @classmethod
    @contextlib.contextmanager
    def of(cls, reader: Reader) -> Iterator[Gauge]:
        gauge = cls(reader)
        try:
            yield gauge
        finally:
            gauge.stop()
            gauge._stacks.close()

    def stop(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._wire.close()
            self._child = None

    def measure(self, data: bytes, runs: int = 1) -> Cost:
        """Read an input ``runs`` times; the CPU time is the least."""
        if self._child is None:
            self._start()
        limit_s = self.reader.limit_s(len(data)) * runs
        self._wire.send((data, runs))
        for share in (1, 8):  # counting takes longer
            found = self._answer(limit_s * share)
            if isinstance(found, str):
                where = self._where()
                self.stop()
                return Cost(size=len(data), problem=found, where=where)
        return Cost(size=max(len(data), 1), **found)

    def confirmed(self, data: bytes) -> Cost:
        """Read an input several times, for what is near a bound."""
        return self.measure(data, _RECHECKS)

    def _start(self) -> None:
        self._wire, other = _FORK.Pipe()
        self._stacks.seek(0)
        self._stacks.truncate()
        self._read = self._read or self.reader.make()
        given = (self._read, other, self._stacks.fileno(), self.reader.resident)
        self._child = _FORK.Process(target=_serve, args=given, daemon=True)
        self._child.start()
        other.close()
        assert self._answer(120.0) == "ready", f"{self.reader.name} can't be made"

    def _answer(self, limit_s: float) -> Any:
        """Wait for the child; returns why it was given up, or what it sent."""
        used_s, _ = self._used()
        wall_s = time.monotonic() + 10 + 20 * limit_s
        while not self._wire.poll(0.02):
            now_s, resident = self._used()
            if now_s - used_s > limit_s or time.monotonic() > wall_s:
                return f"did not end within {limit_s:.1f} s of CPU time"
            if resident > _MOST_RESIDENT:
                return f"took more than {_MOST_RESIDENT >> 20} MiB"
            if not self._child.is_alive():
                return f"died with {self._child.exitcode}"
        try:
            return self._wire.recv()
        except EOFError:
            return "died"

    def _used(self) -> tuple[float, int]:
        folder = Path(f"/proc/{self._child.pid}")
        try:
            fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
            pages = int(folder.joinpath("statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0.0, 0
        return (int(fields[11]) + int(fields[12])) / _TICKS, pages * _PAGE

    def _where(self) -> str:
        """Ask a child that doesn't answer where it is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGUSR1)
        ends_s = time.monotonic() + 2
        while time.monotonic() < ends_s and self._child.is_alive():
            self._stacks.seek(0)
            frames = _FRAME.findall(self._stacks.read().decode())
            if frames:
                path, _, name = next(
                    (each for each in frames if "python" not in each[0]), frames[0]
                )
                return f"{Path(path).name} {name}"
            time.sleep(0.01)
        return "?"
