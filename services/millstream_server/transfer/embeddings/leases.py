"""Leases: who may fetch a tensor of the store, and until when it is kept."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from millstream_server.transfer.embeddings.store import EmbeddingStore, Stored


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
        """Seconds until it ends, at least 0."""
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
        self._open: dict[str, tuple[Lease, Hashable, asyncio.TimerHandle]] = {}
        self._of: dict[Hashable, set[str]] = {}

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def grant(self, stored: Stored, owner: Hashable) -> Lease:
        """Make a lease for ``owner``, such as a stream; it pins the tensor."""
        self.store.pin(stored)
        lease = Lease(secrets.token_hex(16), stored, time.monotonic() + self._lease_s)
        timer = asyncio.get_running_loop().call_later(self._lease_s, self.release, lease.name)
        self._open[lease.name] = (lease, owner, timer)
        self._of.setdefault(owner, set()).add(lease.name)
        return lease

    def find(self, name: str) -> Lease | None:
        """Return an open lease."""
        entry = self._open.get(name)
        return entry[0] if entry else None

    def release(self, name: str) -> None:
        """End a lease; an unknown one is ignored."""
        entry = self._open.pop(name, None)
        if entry is None:
            return
        lease, owner, timer = entry
        timer.cancel()
        names = self._of[owner]
        names.remove(name)
        if not names:
            del self._of[owner]
        self.store.unpin(lease.stored)
        self._on_ended()

    def release_all(self, owner: Hashable) -> None:
        """End all leases of an owner: its stream has ended."""
        for name in list(self._of.get(owner, ())):
            self.release(name)

    def close(self) -> None:
        """End all."""
        for name in list(self._open):
            self.release(name)
