"""The ways in which the bytes of an embedding go from one process to another.

The receiver says what it can (`Abilities`), the sender picks a way and says where the bytes are
(`Offer`), the receiver reads them. Order: shared memory, NIXL, inline. Inline always works: its
bytes follow in messages, which is the business of who has the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass

CHUNK_BYTES = 2 << 20
"""Most bytes of an inline message, and of what is copied while the event loop waits."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a receiver can; see FetchStart in encode.proto."""

    shared_memory_domain: str = ""
    open_segments: tuple[str, ...] = ()
    nixl_metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class InlineOffer:
    """The bytes follow in messages."""


@dataclass(frozen=True, slots=True)
class SharedMemoryOffer:
    """The bytes are in a segment of the sender; see SharedMemoryBytes in encode.proto."""

    segment: str
    name: str
    segment_size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """The bytes are in registered memory of the sender."""

    metadata: bytes
    address: int


Offer = InlineOffer | SharedMemoryOffer | NixlOffer
WAY_OF: dict[type[Offer], str] = {
    InlineOffer: "inline",
    SharedMemoryOffer: "shared_memory",
    NixlOffer: "nixl",
}
"""Their names in metrics, traces and `FetchOffer`, whose fields are named as these types' are."""


class WayError(Exception):
    """A way's `read` doesn't work at the moment; the inline way may."""

    def __init__(self, cause: str, detail: str = "") -> None:
        """``cause`` is a short word for the other end; ``detail`` is for this end's log."""
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Opening:
    """An offer, and what to call at the receiver's next message, or when there will be none."""

    offer: Offer
    close: Callable[[], None] = lambda: None


def new_memory(nbytes: int) -> memoryview:
    """Return fresh memory, which is freed with its last view."""
    return memoryview(bytearray(nbytes) if nbytes < CHUNK_BYTES else new_mapping(nbytes))


def new_mapping(nbytes: int) -> mmap.mmap:
    """Map fresh memory in huge pages: a first write to 4 KiB pages takes three times as long."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # this system has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


async def copied(source: memoryview) -> memoryview:
    """Copy into fresh memory, and let the event loop run in between."""
    target = new_memory(source.nbytes)
    for begin in range(0, source.nbytes, CHUNK_BYTES):
        if begin:
            await asyncio.sleep(0)
        target[begin : begin + CHUNK_BYTES] = source[begin : begin + CHUNK_BYTES]
    return target
