"""How the C library gives memory back: large blocks at once, others when enough is free.

By itself glibc learns from the first large block that is freed to keep blocks of that size (up to
32 MiB) in its heaps: after images of 10 MB a process held ten times what it used, for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 256 << 10
"""A block of this size has pages of its own."""
_KEPT_BYTES = 16 << 20
"""Free memory at a heap's end that is kept."""
_ARENAS = 4


def give_back_freed_memory() -> None:
    """Set glibc's limits for this process; elsewhere do nothing."""
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)


def trim_in_background() -> None:
    """Give back what is free inside the heaps: small blocks, such as gRPC's buffers."""
    trim = _function("malloc_trim")
    if trim is not None:
        threading.Thread(target=trim, args=(0,), name="trim", daemon=True).start()


def out_of_memory_kills(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes of this container the kernel killed for memory; 0: not known."""
    for name in ("memory.events", "memory/memory.oom_control"):  # of cgroup v2 and v1
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", (cgroup / name).read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def _function(name: str) -> Callable[..., Any] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), name, None)
