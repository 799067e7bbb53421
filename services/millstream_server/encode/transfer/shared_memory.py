"""Shared memory: the sender hands its arena's descriptor to a receiver on the same machine, once.

The descriptor goes through a Unix socket with a random name below /dev/shm, so that processes in
different containers find it where they share that mount. The name exists from the offer until the
receiver has connected, and it is a socket: whatever is killed, no memory is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import mmap
import os
import re
import secrets
import socket
import stat
import struct
import time
from pathlib import Path

from millstream_server.encode.transfer.arena import Arena, is_sealed
from millstream_server.encode.transfer.store import Stored
from millstream_server.encode.transfer.ways import (
    Abilities,
    Opening,
    SharedMemoryOffer,
    WayError,
    copied,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

FOLDER = Path("/dev/shm")  # noqa: S108 - the names are random, and sockets
_NAME = re.compile(r"millstream-[0-9a-f]{32}")
_STALE_S = 60.0
"""A name this old is no longer in use: its process was killed."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def domain() -> str:
    """Return what identifies this kernel, this mount of /dev/shm and this user; empty: no mount."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii")
        found = FOLDER.stat()
    except OSError as error:
        log.info("no shared memory for embeddings", reason=str(error))
        return ""
    if not os.access(FOLDER, os.W_OK | os.X_OK):
        return ""
    return hashlib.sha256(f"{boot}:{found.st_dev}:{os.geteuid()}".encode()).hexdigest()[:32]


def sweep(folder: Path = FOLDER, now: float | None = None) -> int:
    """Remove names that killed processes left behind; return how many."""
    oldest = (time.time() if now is None else now) - _STALE_S
    removed = 0
    with contextlib.suppress(OSError):
        for path in folder.glob("millstream-*"):
            with contextlib.suppress(OSError):  # another process has removed it, or it is not ours
                found = path.lstat()
                if (
                    _NAME.fullmatch(path.name)
                    and stat.S_ISSOCK(found.st_mode)
                    and found.st_mtime < oldest
                ):
                    path.unlink()
                    removed += 1
    return removed


# ---- the sender ----------------------------------------------------------------------------------


class SharedMemorySender:
    """Offers tensors of an arena that other processes can map."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        if removed := sweep():
            log.info("names of killed processes removed", count=removed)

    async def open(self, stored: Stored, abilities: Abilities) -> Opening | None:
        """Offer a pinned tensor; None: this receiver can't take it in this way."""
        arena = self._arena
        if arena.fd is None or not domain() or abilities.shared_memory_domain != domain():
            return None
        segment, size, offset = arena.id, arena.nbytes, stored.offset
        if segment in abilities.open_segments:
            return Opening(SharedMemoryOffer(segment, "", size, offset))
        try:
            hand_over = _HandOver(arena.fd)
        except OSError as error:
            log.warning("the memory can't be handed over; using another way", reason=str(error))
            return None
        return Opening(SharedMemoryOffer(segment, hand_over.name, size, offset), hand_over.close)


class _HandOver:
    """Gives a descriptor to who connects first, and to nobody else."""

    def __init__(self, fd: int) -> None:
        self.name = f"millstream-{secrets.token_hex(16)}"
        self._fd = os.dup(fd)
        self._path = FOLDER / self.name
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._open = True
        try:
            os.fchmod(self._socket.fileno(), 0o600)
            self._socket.bind(str(self._path))
            self._socket.listen(1)
            self._loop.add_reader(self._socket.fileno(), self._hand_over)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            os.close(self._fd)
            with contextlib.suppress(OSError):  # the receiver removes it, too
                self._path.unlink()

    def _hand_over(self) -> None:
        try:
            connection, _ = self._socket.accept()
            with connection:
                who = struct.unpack(
                    "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                )
                if who[1] in (os.geteuid(), 0):
                    socket.send_fds(connection, [b"\0"], [self._fd])
        except OSError as error:
            log.warning("the memory was not handed over", reason=str(error))
        self.close()


# ---- the receiver --------------------------------------------------------------------------------


class SharedMemoryReceiver:
    """The segments of one sender that are mapped here."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}

    @property
    def open_segments(self) -> tuple[str, ...]:
        return tuple(self._mapped)

    async def read(self, offer: SharedMemoryOffer, nbytes: int) -> memoryview:
        """Return a copy of the bytes."""
        mapped = self._mapped.get(offer.segment)
        if mapped is None:
            mapped = self._mapped[offer.segment] = await _mapped(offer)
        if offer.offset + nbytes > len(mapped):
            raise WayError("range", f"{offer.offset} + {nbytes} of {len(mapped)}")
        with memoryview(mapped) as whole, whole[offer.offset : offer.offset + nbytes] as part:
            return await copied(part)

    def close(self) -> None:
        """Unmap all; a read that runs keeps its own until it ends."""
        mapped, self._mapped = self._mapped, {}
        for memory in mapped.values():
            with contextlib.suppress(BufferError):
                memory.close()


async def _mapped(offer: SharedMemoryOffer) -> mmap.mmap:
    if not _NAME.fullmatch(offer.name):
        raise WayError("name", "not a name that a sender makes")
    path = FOLDER / offer.name
    try:
        fd = await _fetch_descriptor(path)
    except OSError as error:
        raise WayError("open", str(error)) from error
    finally:
        with contextlib.suppress(OSError):  # the sender removes it, if it still lives
            path.unlink()
    try:
        size = os.fstat(fd).st_size
        if size != offer.segment_size_bytes or not is_sealed(fd):
            raise WayError("segment", f"it has {size} bytes, not {offer.segment_size_bytes}")
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        raise WayError("map", str(error)) from error
    finally:
        os.close(fd)


async def _fetch_descriptor(path: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection:
        connection.connect(str(path))
        await _readable(connection)
        _, found, *_ = socket.recv_fds(connection, 1, 1)
        if not found:
            raise OSError("the sender gave no descriptor")
        os.set_inheritable(found[0], False)  # noqa: FBT003 - the library's signature
        return found[0]


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())
