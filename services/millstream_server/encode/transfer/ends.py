"""The two ends of a transfer: the sender's choice of a way, and the receiver's ends of the ways."""

from __future__ import annotations

from millstream_server.encode.transfer import nixl, shared_memory
from millstream_server.encode.transfer.nixl import NixlReceiver, NixlSender
from millstream_server.encode.transfer.settings import Transfer
from millstream_server.encode.transfer.shared_memory import (
    SharedMemoryReceiver,
    SharedMemorySender,
)
from millstream_server.encode.transfer.store import EmbeddingStore, Stored
from millstream_server.encode.transfer.ways import (
    Abilities,
    InlineOffer,
    NixlOffer,
    Opening,
    SharedMemoryOffer,
    WayError,
)


class Sender:
    """Offers tensors of a store in the best way that both ends can."""

    def __init__(self, store: EmbeddingStore, transfer: Transfer = Transfer.AUTO) -> None:
        """Offer what ``transfer`` allows; inline always is."""
        self._ways: list[SharedMemorySender | NixlSender] = []
        if transfer in (Transfer.AUTO, Transfer.SHARED_MEMORY):
            self._ways.append(SharedMemorySender(store.arena))
        if transfer in (Transfer.AUTO, Transfer.NIXL) and nixl.available():
            self._ways.append(NixlSender(store.arena))

    async def open(self, stored: Stored, abilities: Abilities) -> Opening:
        for way in self._ways:
            opening = await way.open(stored, abilities)
            if opening is not None:
                return opening
        return Opening(InlineOffer())


class Receiver:
    """Reads what one sender offers. NIXL's agent is shared by all receivers of the process."""

    def __init__(self, transfer: Transfer, nixl: NixlReceiver | None) -> None:
        """Take what ``transfer`` allows; ``nixl`` None: not installed, or not allowed."""
        self._shared = transfer in (Transfer.AUTO, Transfer.SHARED_MEMORY)
        self._nixl = nixl
        self._segments = SharedMemoryReceiver()
        self._remote = b""
        """Metadata of the sender's NIXL agent."""

    def abilities(self) -> Abilities:
        if self._nixl is not None and not self._shared:
            self._nixl.begin()
        return Abilities(
            shared_memory.domain() if self._shared else "",
            self._segments.open_segments,
            self._nixl.metadata if self._nixl else b"",
        )

    async def read(self, offer: SharedMemoryOffer | NixlOffer, nbytes: int) -> memoryview:
        """Return the bytes in memory of their own.

        Raises:
            WayError: this way doesn't work at the moment.
        """
        if isinstance(offer, SharedMemoryOffer):
            return await self._segments.read(offer, nbytes)
        if self._nixl is None:
            raise WayError("nixl_agent", "offered without being asked for")
        self._remote = offer.metadata
        return await self._nixl.read(offer, nbytes)

    def went_inline(self) -> None:
        if self._nixl is not None:
            self._nixl.begin()

    def close(self) -> None:
        self._segments.close()
        if self._nixl is not None and self._remote:
            self._nixl.forget(self._remote)
