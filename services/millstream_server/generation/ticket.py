"""Hand-off tickets: signed by the Processor, checked by both workers, valid once."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from millstream_server.runtime.errors import InvalidRequestError

_CONTEXT = b"millstream.v1.ticket"
_MIN_KEY_BYTES = 32
TICKET_LIFETIME_S = 60.0
"""Enough for small clock differences and a full queue; short, in case a ticket is stolen."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Lets one prefill and one decode worker transfer a KV cache; see kv_transfer.proto.

    ``room`` is the transfer's number. A worker's `TicketGate` checks expiry and signature; its
    engine uses the rest.
    """

    bootstrap_host: str
    bootstrap_port: int
    room: int
    """Below 2**63 and never used twice."""
    prefill_dp_rank: int | None = None
    expires_at_ms: int = 0
    """Unix time."""
    signature: bytes = b""


class TicketKey:
    """The suite's shared key, which signs tickets."""

    def __init__(self, key: bytes) -> None:
        """Take a key of at least 32 bytes.

        Raises:
            ValueError: the key is shorter.
        """
        if len(key) < _MIN_KEY_BYTES:
            message = f"a ticket key has at least {_MIN_KEY_BYTES} bytes, this one {len(key)}"
            raise ValueError(message)
        self._key = key

    @classmethod
    def from_hex(cls, text: str) -> TicketKey:
        """Parse the setting `MILLSTREAM_TICKET_KEY`, in hex.

        Raises:
            ValueError: it isn't hex, or too short.
        """
        return cls(bytes.fromhex(text))

    def mint(
        self, bootstrap_host: str, bootstrap_port: int, prefill_dp_rank: int | None = None
    ) -> Ticket:
        """Make a signed ticket with a new room number."""
        ticket = Ticket(
            bootstrap_host=bootstrap_host,
            bootstrap_port=bootstrap_port,
            room=secrets.randbits(63),
            prefill_dp_rank=prefill_dp_rank,
            expires_at_ms=int((time.time() + TICKET_LIFETIME_S) * 1000),
        )
        return replace(ticket, signature=self._sign(ticket))

    def genuine(self, ticket: Ticket) -> bool:
        """Return whether the ticket is signed with this key."""
        try:
            expected = self._sign(ticket)
        except (struct.error, OverflowError):
            return False
        return hmac.compare_digest(expected, ticket.signature)

    def _sign(self, ticket: Ticket) -> bytes:
        host = ticket.bootstrap_host.encode()
        rank = 0 if ticket.prefill_dp_rank is None else ticket.prefill_dp_rank + 1
        data = struct.pack(
            f">{len(_CONTEXT)}sH{len(host)}sHQIQ",
            _CONTEXT,
            len(host),
            host,
            ticket.bootstrap_port,
            ticket.room,
            rank,
            ticket.expires_at_ms,
        )
        return self.sign(data)

    def sign(self, data: bytes) -> bytes:
        """Return the HMAC-SHA256 of ``data``, whose first bytes say what kind of ticket it is."""
        return hmac.new(self._key, data, hashlib.sha256).digest()


class TicketGate:
    """A worker's check of a ticket: signature, expiry, and its room not used before."""

    def __init__(self, key: TicketKey, now: Callable[[], float] = time.time) -> None:
        """Check with ``key``; ``now`` is Unix time in seconds."""
        self._key = key
        self._now = now
        self._rooms: OrderedDict[int, int] = OrderedDict()  # room -> expiry, about in its order

    def admit(self, ticket: Ticket) -> None:
        """Accept the ticket, once.

        Raises:
            InvalidRequestError: it is forged, expired or used.
        """
        now_ms = int(self._now() * 1000)
        if not self._key.genuine(ticket):
            raise InvalidRequestError.of("ticket.signature", "does not match the suite's key")
        if now_ms > ticket.expires_at_ms:
            raise InvalidRequestError.of("ticket.expires_at", "has passed; mint a new ticket")
        if ticket.room in self._rooms:
            raise InvalidRequestError.of("ticket.room", "was used before; mint a new ticket")
        self._rooms[ticket.room] = ticket.expires_at_ms
        while self._rooms:
            room, expiry = next(iter(self._rooms.items()))
            if expiry >= now_ms:
                break
            del self._rooms[room]
