"""An encode worker's results: its cache, where all ways of transfer read them from, and its leases.

A lease says who may fetch a tensor, and until when it is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from millstream_server.encode.transfer.arena import Allocator, Arena, aligned
from millstream_server.media.tensor import Tensor, TensorSpec
from millstream_server.runtime.errors import InvalidRequestError, OverloadedError

_STEP_BYTES = 2 << 20
"""Most that is copied while the event loop waits: memory that is new takes 0.1 s for 64 MiB."""


class Stored:
    """A tensor in a store. Its bytes are safe while it is pinned; else the next `put` may drop it.

    Only `EmbeddingStore` makes and changes it.
    """

    __slots__ = ("arena", "digest", "dropped", "item", "offset", "pins", "spec")

    def __init__(
        self, arena: Arena, digest: bytes, spec: TensorSpec, item: Any, offset: int
    ) -> None:
        self.arena = arena
        self.digest = digest
        self.spec = spec
        self.item = item
        """What the caller of `put` wanted to remember of it."""
        self.offset = offset
        self.pins = 0
        self.dropped = False

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def view(self) -> memoryview:
        """Its bytes, for reading, without a copy."""
        return self.arena.view(self.offset, self.nbytes)


class EmbeddingStore:
    """Tensors by digest in one `Arena`. What isn't pinned is dropped, the oldest first, for room.

    For one thread. Sizes count with what alignment takes.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes``; what isn't pinned goes when room is needed."""
        self.arena = Arena(capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.pinned_bytes = 0
        self._allocator = Allocator(capacity_bytes)
        self._entries: dict[bytes, Stored] = {}
        self._unpinned: OrderedDict[bytes, Stored] = OrderedDict()  # the oldest first

    def get(self, digest: bytes) -> Stored | None:
        """Return a tensor, which is the newest from now on; None: it isn't here."""
        if digest in self._unpinned:
            self._unpinned.move_to_end(digest)
        return self._entries.get(digest)

    def put(self, digest: bytes, tensor: Tensor, item: Any) -> Stored:
        """Copy a tensor in; the one that is here is returned where there is one.

        Raises:
            OverloadedError: other tensors that are pinned leave no room.
            InvalidRequestError: it is larger than the store.
        """
        known = self.get(digest)
        if known is not None:
            return known
        offset = self._make_room(tensor.spec.nbytes)
        self.arena.write(offset, tensor.data)
        return self._added(Stored(self.arena, digest, tensor.spec, item, offset))

    async def put_in_steps(self, digest: bytes, tensor: Tensor, item: Any) -> Stored:
        """Do as `put`, and let the event loop run between steps."""
        nbytes = tensor.spec.nbytes
        if nbytes <= _STEP_BYTES or digest in self._entries:
            return self.put(digest, tensor, item)
        offset, data = self._make_room(nbytes), tensor.data.cast("B")
        self._reserve(aligned(nbytes))
        try:
            for begin in range(0, nbytes, _STEP_BYTES):
                self.arena.write(offset + begin, data[begin : begin + _STEP_BYTES])
                await asyncio.sleep(0)
        except BaseException:
            self._allocator.give_back(offset, nbytes)
            raise
        finally:
            self._reserve(-aligned(nbytes))
        known = self.get(digest)
        if known is not None:  # put by another one meanwhile
            self._allocator.give_back(offset, nbytes)
            return known
        return self._added(Stored(self.arena, digest, tensor.spec, item, offset))

    def pin(self, stored: Stored) -> None:
        """Keep a tensor until as many `unpin`."""
        if stored.dropped:
            raise ValueError("the tensor is no longer in the store")
        stored.pins += 1
        if stored.pins == 1:
            del self._unpinned[stored.digest]
            self.pinned_bytes += aligned(stored.nbytes)

    def unpin(self, stored: Stored) -> None:
        """Undo one `pin`; after the last one the tensor is the newest of those to drop."""
        if not stored.pins:
            raise ValueError("the tensor isn't pinned")
        stored.pins -= 1
        if not stored.pins:
            self._unpinned[stored.digest] = stored
            self.pinned_bytes -= aligned(stored.nbytes)

    @contextlib.contextmanager
    def pinned(self, stored: Stored) -> Iterator[None]:
        self.pin(stored)
        try:
            yield
        finally:
            self.unpin(stored)

    def close(self) -> None:
        """Forget all; the memory goes back when the last view of it is gone."""
        self._entries.clear()
        self._unpinned.clear()
        self.arena.close()

    def _added(self, stored: Stored) -> Stored:
        self._entries[stored.digest] = self._unpinned[stored.digest] = stored
        self.used_bytes += aligned(stored.nbytes)
        return stored

    def _reserve(self, size: int) -> None:
        """Count what is being written as used, and as not to be dropped."""
        self.used_bytes += size
        self.pinned_bytes += size

    def _make_room(self, nbytes: int) -> int:
        size = aligned(nbytes)
        if size > self.capacity_bytes:
            raise InvalidRequestError.of(
                "data",
                f"its embedding has {nbytes} bytes; this worker's store has {self.capacity_bytes}; "
                "send a smaller image or a shorter video",
            )
        if size <= self.capacity_bytes - self.pinned_bytes:
            while (offset := self._allocator.take(nbytes)) is None and self._unpinned:
                self._drop_oldest()
            if offset is not None:
                return offset
        raise OverloadedError(
            f"{nbytes} bytes for an embedding aren't free: {self.pinned_bytes} of "
            f"{self.capacity_bytes} hold others that are not fetched yet; retry",
            retry_delay_s=1.0,
        )

    def _drop_oldest(self) -> None:
        digest, stored = self._unpinned.popitem(last=False)
        del self._entries[digest]
        stored.dropped = True
        self.used_bytes -= aligned(stored.nbytes)
        self._allocator.give_back(stored.offset, stored.nbytes)


@dataclass(frozen=True, slots=True)
class Lease:
    """Keeps a tensor in the store. Who knows the name may fetch it."""

    name: str
    """128 random bits, in hex."""
    stored: Stored
    expires_s: float
    """On the clock of `time.monotonic`."""

    @property
    def left_s(self) -> float:
        return max(0.0, self.expires_s - time.monotonic())


class Leases:
    """The open leases of a store. For one event loop."""

    def __init__(
        self, store: EmbeddingStore, lease_s: float, on_ended: Callable[[], None] = lambda: None
    ) -> None:
        """A lease ends after ``lease_s`` at the latest; ``on_ended`` is called at each end."""
        self.store = store
        self._lease_s = lease_s
        self._on_ended = on_ended
        self._open: dict[str, tuple[Lease, object, asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def grant(self, stored: Stored, owner: object) -> Lease:
        """Make a lease for ``owner``, such as a stream; it pins the tensor."""
        self.store.pin(stored)
        lease = Lease(secrets.token_hex(16), stored, time.monotonic() + self._lease_s)
        timer = asyncio.get_running_loop().call_later(self._lease_s, self.release, lease.name)
        self._open[lease.name] = (lease, owner, timer)
        return lease

    def find(self, name: str) -> Lease | None:
        entry = self._open.get(name)
        return entry[0] if entry else None

    def release(self, name: str) -> None:
        """End a lease; an unknown one is ignored."""
        entry = self._open.pop(name, None)
        if entry is None:
            return
        lease, _, timer = entry
        timer.cancel()
        self.store.unpin(lease.stored)
        self._on_ended()

    def release_all(self, owner: object) -> None:
        """End all leases of an owner: its stream has ended."""
        for name in [name for name, (_, its, _) in self._open.items() if its == owner]:
            self.release(name)

    def close(self) -> None:
        for name in list(self._open):
            self.release(name)
