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
_CONTEXT_2 = b"millstream.v2.ticket"
MAX_ENGINE_DATA_BYTES = 64 << 10
"""Most engine data of one ticket."""
TICKET_LIFETIME_S = 60.0
"""Enough for small clock differences and a full queue; short, in case a ticket is stolen."""


@dataclass(frozen=True, slots=True)
class EngineData:
    """What one engine tells another of the same kind about a hand-off; nothing else reads it."""

    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """How a prefill or decode engine hands off; see kv_transfer.proto."""

    kind: str
    """Name of the way and of its data's format, at most 64 bytes; only equal kinds are paired."""
    data: bytes = b""
    """Prefill engines: what decode needs to know of this one, at most 4 KiB; in every ticket."""
    prefill_first: bool = False
    """Decode starts when prefill has finished, with what its `Finish.engine_data` says."""

    @property
    def needs_data(self) -> bool:
        """Whether tickets without engine data, those of contracts before 1.2, are of no use."""
        return self.prefill_first or bool(self.data)


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
    engine_data: EngineData | None = None
    """What the prefill engine tells decode's; None: a ticket as before contract 1.2."""


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
        self,
        bootstrap_host: str,
        bootstrap_port: int,
        prefill_dp_rank: int | None = None,
        engine_data: EngineData | None = None,
    ) -> Ticket:
        """Make a signed ticket with a new room number."""
        ticket = Ticket(
            bootstrap_host=bootstrap_host,
            bootstrap_port=bootstrap_port,
            room=secrets.randbits(63),
            prefill_dp_rank=prefill_dp_rank,
            expires_at_ms=_expiry_ms(),
            engine_data=engine_data,
        )
        return replace(ticket, signature=self._sign(ticket))

    def renew(self, ticket: Ticket, engine_data: EngineData | None) -> Ticket:
        """Make the ticket of a hand-off's second leg: the same room, other data, a new expiry."""
        renewed = replace(ticket, engine_data=engine_data, expires_at_ms=_expiry_ms())
        return replace(renewed, signature=self._sign(renewed))

    def genuine(self, ticket: Ticket) -> bool:
        try:
            expected = self._sign(ticket)
        except (struct.error, OverflowError):
            return False
        return hmac.compare_digest(expected, ticket.signature)

    def _sign(self, ticket: Ticket) -> bytes:
        host = ticket.bootstrap_host.encode()
        rank = 0 if ticket.prefill_dp_rank is None else ticket.prefill_dp_rank + 1
        given = ticket.engine_data
        data = struct.pack(
            f">{len(_CONTEXT)}sH{len(host)}sHQIQ",
            _CONTEXT if given is None else _CONTEXT_2,
            len(host),
            host,
            ticket.bootstrap_port,
            ticket.room,
            rank,
            ticket.expires_at_ms,
        )
        if given is not None:
            kind, digest = given.kind.encode(), hashlib.sha256(given.data).digest()
            data += struct.pack(f">H{len(kind)}s32s", len(kind), kind, digest)
        return self.sign(data)

    def sign(self, data: bytes) -> bytes:
        """Return the HMAC-SHA256 of ``data``, whose first bytes say what kind of ticket it is."""
        return hmac.new(self._key, data, hashlib.sha256).digest()


def _expiry_ms() -> int:
    return int((time.time() + TICKET_LIFETIME_S) * 1000)


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
