"""The encode workers that a worker fetches from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from millstream_server.runtime.security.tls import ClientTls
from millstream_server.transfer.embeddings import nixl
from millstream_server.transfer.embeddings.ends import Receiver
from millstream_server.transfer.embeddings.nixl import NixlReceiver
from millstream_server.transfer.embeddings.settings import Transfer
from millstream_server.worker.embeddings.peer import Peer

UNUSED_S = 60.0
"""A sender that nothing is fetched from for so long is disconnected, and its memory unmapped."""


class Peers:
    """One `Peer` per address, while it is used and some time after."""

    def __init__(
        self, transfer: Transfer, tls: ClientTls | None, *, unused_s: float = UNUSED_S
    ) -> None:
        """Offer the ways of ``transfer``."""
        self._transfer = transfer
        self._tls = tls
        self._unused_s = unused_s
        wants_nixl = transfer in (Transfer.AUTO, Transfer.NIXL) and nixl.available()
        self._nixl = NixlReceiver() if wants_nixl else None
        self._open: dict[str, Peer] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Return how many are connected."""
        return len(self._open)

    @contextlib.contextmanager
    def using(self, address: str) -> Iterator[Peer]:
        """Connect, and stay connected inside the block. Changed certificates need a new channel."""
        self._stop_timer(address)
        peer = self._open.get(address)
        if peer is None or (self._tls and self._tls.changed()):
            if peer is not None and not peer.fetching:
                self._close(peer)
            peer = self._open[address] = Peer(
                address, self._tls, Receiver(self._transfer, self._nixl)
            )
        peer.fetching += 1
        try:
            yield peer
        finally:
            peer.fetching -= 1
            if not peer.fetching:
                self._unused(address, peer)

    async def close(self) -> None:
        """Close all channels; fetches that run fail."""
        for address in list(self._open):
            self._disconnect(address)
        if self._closing:
            await asyncio.wait(self._closing)

    def _unused(self, address: str, peer: Peer) -> None:
        if self._open.get(address) is not peer:  # replaced, or all are closed
            self._close(peer)
            return
        loop = asyncio.get_running_loop()
        self._timers[address] = loop.call_later(self._unused_s, self._disconnect, address)

    def _disconnect(self, address: str) -> None:
        self._stop_timer(address)
        self._close(self._open.pop(address))

    def _stop_timer(self, address: str) -> None:
        timer = self._timers.pop(address, None)
        if timer is not None:
            timer.cancel()

    def _close(self, peer: Peer) -> None:
        closing = asyncio.create_task(peer.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
