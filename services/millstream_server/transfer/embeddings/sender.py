"""The sender's choice of a way."""

from __future__ import annotations

from millstream_server.transfer.embeddings import nixl
from millstream_server.transfer.embeddings.nixl import NixlSender
from millstream_server.transfer.embeddings.settings import Transfer
from millstream_server.transfer.embeddings.shared_memory import SharedMemorySender
from millstream_server.transfer.embeddings.store import EmbeddingStore, Stored
from millstream_server.transfer.embeddings.ways import (
    Abilities,
    InlineOffer,
    Opening,
    SendingWay,
)


class Sender:
    """Offers tensors of a store in the best way that both ends can."""

    def __init__(self, store: EmbeddingStore, transfer: Transfer = Transfer.AUTO) -> None:
        """Offer what ``transfer`` allows; inline always is."""
        self._ways: list[SendingWay] = []
        if transfer in (Transfer.AUTO, Transfer.SHARED_MEMORY):
            self._ways.append(SharedMemorySender(store.arena))
        if transfer in (Transfer.AUTO, Transfer.NIXL) and nixl.available():
            self._ways.append(NixlSender(store.arena))

    async def open(self, stored: Stored, abilities: Abilities) -> Opening:
        """Offer a pinned tensor."""
        for way in self._ways:
            opening = await way.open(stored, abilities)
            if opening is not None:
                return opening
        return Opening(InlineOffer())

    def close(self) -> None:
        """Free what the ways hold."""
        for way in self._ways:
            way.close()
