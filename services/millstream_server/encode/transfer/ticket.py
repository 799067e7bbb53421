"""Embedding tickets: signed by the Processor, checked by both workers.

Unlike a ticket of a KV hand-off it may be used several times until it expires: a request for n
choices fetches an embedding on each worker, and a request that is tried again fetches it again.
"""

from __future__ import annotations

import dataclasses
import hmac
import struct
import time
from collections.abc import Callable

from millstream_server.generation.ticket import TICKET_LIFETIME_S, TicketKey
from millstream_server.media.items import Content, EmbeddingTicket, EncodedItem
from millstream_server.media.tensor import ElementType
from millstream_server.runtime.errors import InvalidRequestError

_CONTEXT = b"millstream.v1.embedding"
# The numbers of tensor.proto and media.proto; a test compares.
_ELEMENTS = {ElementType.FLOAT32: 1, ElementType.BFLOAT16: 2, ElementType.FLOAT16: 3}
_CONTENTS = {Content.ROWS: 1, Content.PIXELS: 2}


class EmbeddingTickets:
    """Signs and checks tickets with the suite's key."""

    def __init__(self, key: TicketKey, now: Callable[[], float] = time.time) -> None:
        """``now`` is Unix time in seconds."""
        self._key = key
        self._now = now

    def mint(self, address: str, item: EncodedItem) -> EmbeddingTicket:
        ticket = EmbeddingTicket(
            address=address,
            lease=item.lease,
            tensor=item.tensor,
            content=item.content,
            expires_at_ms=int((self._now() + TICKET_LIFETIME_S) * 1000),
        )
        return dataclasses.replace(ticket, signature=self._key.sign(_signed_bytes(ticket)))

    def check(self, ticket: EmbeddingTicket) -> None:
        """Accept the ticket.

        Raises:
            InvalidRequestError: it is forged or expired.
        """
        if not self._genuine(ticket):
            raise InvalidRequestError.of("ticket.signature", "does not match the suite's key")
        if int(self._now() * 1000) > ticket.expires_at_ms:
            raise InvalidRequestError.of("ticket.expires_at", "has passed; mint a new ticket")

    def _genuine(self, ticket: EmbeddingTicket) -> bool:
        try:
            expected = self._key.sign(_signed_bytes(ticket))
        except (struct.error, OverflowError, UnicodeEncodeError):
            return False
        return hmac.compare_digest(expected, ticket.signature)


def _signed_bytes(ticket: EmbeddingTicket) -> bytes:
    address, lease, shape = ticket.address.encode(), ticket.lease.encode(), ticket.tensor.shape
    return struct.pack(
        f">{len(_CONTEXT)}sH{len(address)}sH{len(lease)}sIH{len(shape)}IIQ",
        _CONTEXT,
        len(address),
        address,
        len(lease),
        lease,
        _ELEMENTS[ticket.tensor.element_type],
        len(shape),
        *shape,
        _CONTENTS[ticket.content],
        ticket.expires_at_ms,
    )
