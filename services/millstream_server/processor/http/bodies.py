"""Where bodies are read: short ones on the event loop, large ones in the pool of readers.

4 MiB of JSON take up to 40 ms, in which the reader holds the interpreter's lock. In the threads
large bodies are read one at a time, callers by turns, as large texts are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from millstream_server.runtime.work.pool import WorkPool

T = TypeVar("T")

_SHORT_BYTES = 64 << 10
_SHORT_OBJECTS = 512
"""Short bodies have fewer: most are read in a millisecond, all in 5 ms; an item with a call, the
most expensive, takes 10 us."""
_SECONDS_PER_BYTE = 30e-9


async def read(threads: WorkPool, body: bytes, work: Callable[[bytes], T]) -> T:
    """Return what ``work`` makes of a body.

    Raises:
        OverloadedError: too much text work waits.
    """
    if len(body) <= _SHORT_BYTES and body.count(b"{") <= _SHORT_OBJECTS:
        return work(body)
    return await threads.run(lambda: _read(body, work), len(body) * _SECONDS_PER_BYTE)


def _read(body: bytes, work: Callable[[bytes], T]) -> T:
    """Read, then leave the interpreter to the event loop for as long as that took."""
    began_s = time.perf_counter()
    try:
        return work(body)
    finally:
        time.sleep(time.perf_counter() - began_s)
