"""One piece of memory that other processes of the machine can map: a memfd.

It has no name: it ends with the last process that has it open, also after a SIGKILL. Its size
counts as memory of the process's container and not against the size of /dev/shm. (A file made with
O_TMPFILE would not do: Linux gives it a name once only.)

An `Allocator` says where in it pieces of different sizes lie.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets

from millstream_server.runtime.telemetry.log import get_log

_ALIGNMENT = 256
"""Every piece begins at a multiple of it: a cache line, and what GPUs' copy engines want."""


class Allocator:
    """First fit over the free ranges of ``[0, size)``."""

    def __init__(self, size: int) -> None:
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


log = get_log(__name__)

_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python has no name for it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE
"""Its size is fixed: a shorter one would be a SIGBUS where it is mapped. Only we can write."""


class Arena:
    """Memory of a fixed size; its pages are taken from the system when they are first written."""

    def __init__(self, nbytes: int) -> None:
        """Make it; where there are no memfds, of memory that can't be shared."""
        self.nbytes = nbytes
        self.id = secrets.token_hex(16)
        """Names it for receivers that keep it mapped."""
        self.fd: int | None = None
        """Its descriptor, for reading; None: it can't be shared."""
        try:
            self.fd, self._map = _make_memfd(max(1, nbytes))
        except (AttributeError, OSError) as error:
            log.warning("no memory that can be shared; using other ways", reason=str(error))
            self._map = mmap.mmap(-1, max(1, nbytes))
        self._view = memoryview(self._map)

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a part, for reading."""
        return self._view[offset : offset + nbytes].toreadonly()

    def write(self, offset: int, data: memoryview) -> None:
        self._view[offset : offset + data.nbytes] = data.cast("B")

    def close(self) -> None:
        """Give the memory back, as soon as nobody has a view of it."""
        self._view.release()
        with contextlib.suppress(BufferError):  # a view is in use: the last one frees it
            self._map.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _make_memfd(nbytes: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("millstream", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd, memory


def is_sealed(fd: int) -> bool:
    """Return whether a descriptor is of an arena, whose size can't change."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False
