"""Which files a process has mapped or open, and how much of them it has read, from /proc.

Works for processes of the same user. Where /proc doesn't tell, nothing is found.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

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
