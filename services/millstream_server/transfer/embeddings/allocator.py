"""Where pieces of different sizes lie in one range of bytes."""

from __future__ import annotations

import bisect

_ALIGNMENT = 256
"""Every piece begins at a multiple of it: a cache line, and what GPUs' copy engines want."""


class Allocator:
    """First fit over the free ranges of ``[0, size)``."""

    def __init__(self, size: int) -> None:
        """All is free."""
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (begin, end), by begin

    def take(self, nbytes: int) -> int | None:
        """Return where ``nbytes`` lie from now on, or None: no free range is long enough."""
        size = aligned(nbytes)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                if end - begin == size:
                    del self._free[index]
                else:
                    self._free[index] = (begin + size, end)
                return begin
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free what `take` returned for ``nbytes``."""
        begin, end = offset, offset + aligned(nbytes)
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


def aligned(nbytes: int) -> int:
    """Return the bytes that a piece of ``nbytes`` takes."""
    return max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
