"""The progress of loading a model, from what an engine's processes do with its files.

Works for processes of the same user. Where /proc doesn't tell, nothing is found.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from millstream_server.control.engine import LoadProgress, LoadStage
from millstream_server.model_files.weights import weight_files

_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ENTRY = 8
_PRESENT = 0x80
_SAMPLES = 32
"""Pages of a file that are looked at."""


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below a process, parents first."""
    waiting = [pid]
    while waiting:
        parent = waiting.pop(0)
        found = sorted(_children(parent))
        yield from found
        waiting += found


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                yield from map(int, (task / "children").read_text().split())


def bytes_read(pid: int, files: Collection[str]) -> dict[str, int]:
    """Return how many bytes a process has read of those ``files`` that it has mapped or open.

    Of a mapped file it is an estimate, from the pages that the process has touched.
    """
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        found |= _opened(pid, files)
        found |= _mapped(pid, files)
    return found


def _opened(pid: int, files: Collection[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    folder = _PROC / str(pid)
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(descriptor.readlink())
            if name in files:
                position = (folder / "fdinfo" / descriptor.name).read_text().split(maxsplit=2)[1]
                found[name] = max(found.get(name, 0), int(position))
    return found


def _mapped(pid: int, files: Collection[str]) -> dict[str, int]:
    folder = _PROC / str(pid)
    ranges: dict[str, tuple[int, int]] = {}
    with (folder / "maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            at = line.find("/")
            if at > 0 and (name := line[at:-1]) in files:
                start, _, end = line.partition(" ")[0].partition("-")
                # A file that is mapped twice is read once.
                ranges.setdefault(name, (int(start, 16), int(end, 16)))
    if not ranges:
        return {}
    with contextlib.suppress(OSError), (folder / "pagemap").open("rb", buffering=0) as pages:
        return {name: _touched(pages.fileno(), *each) for name, each in ranges.items()}
    return dict.fromkeys(ranges, 0)


def _touched(pagemap: int, start: int, end: int) -> int:
    """Estimate how many bytes of a mapping are in the process's page table."""
    first, count = start // _PAGE, (end - start) // _PAGE
    looked = sorted({first + count * n // _SAMPLES for n in range(_SAMPLES)})
    present = 0
    for page in looked:
        entry = os.pread(pagemap, _ENTRY, page * _ENTRY)
        present += len(entry) == _ENTRY and bool(entry[-1] & _PRESENT)
    return (end - start) * present // len(looked)


_LOOKED_AT = 2
"""Processes looked at in one call, until the one is found that reads weights."""
_QUIET_CALLS = 2
"""Calls without any open file of weights after which all is taken as read."""


class WeightsProgress:
    """Watches one process that reads weights; with several ranks, they read side by side.

    A file is done when it was seen open and no longer is. Files that come and go between two calls
    are counted at the end.
    """

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._sizes: dict[str, int] | None = None
        """By the path as the kernel has it."""
        self._process: int | None = None
        self._seen: set[str] = set()
        self._quiet = 0
        self._over = False
        self._start = 0

    def all_read(self) -> None:
        """Say that the model is loaded."""
        self._over = True

    def look(self) -> LoadProgress:
        """Return how far it is; takes about a millisecond."""
        if self._sizes is None:
            self._sizes = _sizes(self._model_path)
        sizes = self._sizes
        read = {} if self._over else self._read(sizes)
        self._note(read)
        files = bytes_done = 0
        if self._over:
            stage, files, bytes_done = LoadStage.PREPARING, len(sizes), sum(sizes.values())
        elif not self._seen:
            stage = LoadStage.STARTING
        else:
            stage = LoadStage.LOADING_WEIGHTS
            done = self._seen - read.keys()
            files = len(done)
            bytes_done = sum(sizes[name] for name in done)
            bytes_done += sum(min(count, sizes[name]) for name, count in read.items())
        return LoadProgress(
            stage=stage,
            files_done=files,
            files_total=len(sizes),
            bytes_done=bytes_done,
            bytes_total=sum(sizes.values()),
        )

    def _note(self, read: dict[str, int]) -> None:
        self._seen |= read.keys()
        self._quiet = 0 if read or not self._seen else self._quiet + 1
        if self._quiet >= _QUIET_CALLS:
            self._over = True

    def _read(self, files: dict[str, int]) -> dict[str, int]:
        if self._process is not None:
            return bytes_read(self._process, files)
        processes = list(descendants(os.getpid()))
        if not processes:
            return {}
        # Another part of them in each call, so that a call stays short.
        self._start %= len(processes)
        for pid in itertools.islice(
            itertools.cycle(processes), self._start, self._start + min(_LOOKED_AT, len(processes))
        ):
            if found := bytes_read(pid, files):
                self._process = pid
                return found
        self._start += _LOOKED_AT
        return {}


def _sizes(model_path: Path) -> dict[str, int]:
    try:
        return {str(file.resolve()): file.stat().st_size for file in weight_files(model_path)}
    except OSError:
        return {}
