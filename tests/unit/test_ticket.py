"""Hand-off tickets against the words of kv_transfer.proto."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import replace

import pytest

from millstream_server.generation.ticket import (
    TICKET_LIFETIME_S,
    EngineData,
    Ticket,
    TicketGate,
    TicketKey,
)
from millstream_server.runtime.errors import InvalidRequestError

SECRET = bytes(range(32))
KEY = TicketKey(SECRET)
TICKET = Ticket(
    bootstrap_host="prefill-0.höst",
    bootstrap_port=8998,
    room=0x0123456789ABCDEF,
    prefill_dp_rank=None,
    expires_at_ms=1_800_000_000_123,
)


def _documented_input(ticket: Ticket) -> bytes:
    """Build what the contract says is signed, byte by byte."""
    host = ticket.bootstrap_host.encode("utf-8")
    rank = 0 if ticket.prefill_dp_rank is None else ticket.prefill_dp_rank + 1
    fields = (
        len(host).to_bytes(2, "big")
        + host
        + ticket.bootstrap_port.to_bytes(2, "big")
        + ticket.room.to_bytes(8, "big")
        + rank.to_bytes(4, "big")
        + ticket.expires_at_ms.to_bytes(8, "big")
    )
    given = ticket.engine_data
    if given is None:
        return b"millstream.v1.ticket" + fields
    kind = given.kind.encode("utf-8")
    digest = hashlib.sha256(given.data).digest()
    return b"millstream.v2.ticket" + fields + len(kind).to_bytes(2, "big") + kind + digest


def _signed(ticket: Ticket, secret: bytes = SECRET) -> Ticket:
    signature = hmac.new(secret, _documented_input(ticket), hashlib.sha256).digest()
    return replace(ticket, signature=signature)


def _refused(gate: TicketGate, ticket: Ticket) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        gate.admit(ticket)
    (violation,) = caught.value.violations
    return violation.field


def test_the_signature_of_a_known_ticket() -> None:
    """Worked out once with another tool: a change of the input breaks running suites."""
    assert _documented_input(TICKET).hex() == (
        "6d696c6c73747265616d2e76312e7469636b6574"
        "000f"
        "70726566696c6c2d302e68c3b67374"
        "2326"
        "0123456789abcdef"
        "00000000"
        "000001a3185c507b"
    )
    assert _signed(TICKET).signature.hex() == (
        "3a511a629551a77f98547ac79d043e968b2ef58019e0210d50e6184ac86e1aa7"
    )
    assert KEY.genuine(_signed(TICKET))


@pytest.mark.parametrize("rank", [None, 0, 1, 7, 2**32 - 2])
def test_rank_0_is_not_no_rank(rank: int | None) -> None:
    ticket = replace(TICKET, prefill_dp_rank=rank)
    assert KEY.genuine(_signed(ticket))
    other = None if rank == 0 else 0
    forged = replace(_signed(ticket), prefill_dp_rank=other)
    assert KEY.genuine(forged) == (rank == other)


def test_minted_tickets_are_as_documented() -> None:
    before = time.time()
    minted = [KEY.mint("host", 1234, 3) for _ in range(100)]
    for ticket in minted:
        assert ticket == _signed(ticket)
        assert (ticket.bootstrap_host, ticket.bootstrap_port) == ("host", 1234)
        assert ticket.prefill_dp_rank == 3
        assert 0 <= ticket.room < 2**63
        lifetime_s = ticket.expires_at_ms / 1000 - before
        assert TICKET_LIFETIME_S - 1 < lifetime_s < TICKET_LIFETIME_S + 5
    assert len({ticket.room for ticket in minted}) == 100


@pytest.mark.parametrize(
    "changes",
    [
        {"bootstrap_host": "prefill-1.höst"},
        {"bootstrap_host": ""},
        {"bootstrap_port": 8999},
        {"bootstrap_port": 8998 + 2**16},
        {"room": 1},
        {"room": 2**64},
        {"prefill_dp_rank": 0},
        {"prefill_dp_rank": 2**32 - 1},
        {"expires_at_ms": 1_900_000_000_000},
        {"expires_at_ms": -1},
        {"signature": b""},
        {"signature": bytes(32)},
    ],
)
def test_any_change_is_forgery(changes: dict[str, object]) -> None:
    forged = replace(_signed(TICKET), **changes)  # type: ignore[arg-type]
    assert not KEY.genuine(forged)
    assert _refused(TicketGate(KEY), forged) == "ticket.signature"


def test_another_suites_ticket_is_forged() -> None:
    assert _refused(TicketGate(KEY), _signed(TICKET, secrets.token_bytes(32))) == "ticket.signature"


def test_a_ticket_is_good_to_its_last_moment() -> None:
    ticket = _signed(TICKET)
    TicketGate(KEY, lambda: ticket.expires_at_ms / 1000).admit(ticket)
    late = TicketGate(KEY, lambda: (ticket.expires_at_ms + 1) / 1000)
    assert _refused(late, ticket) == "ticket.expires_at"


def test_a_room_is_entered_once() -> None:
    gate = TicketGate(KEY, lambda: 1_700_000_000)
    gate.admit(_signed(TICKET))
    assert _refused(gate, _signed(TICKET)) == "ticket.room"
    later = _signed(replace(TICKET, expires_at_ms=TICKET.expires_at_ms + 1))
    assert _refused(gate, later) == "ticket.room"
    gate.admit(_signed(replace(TICKET, room=2)))


def test_a_forged_ticket_does_not_use_up_its_room() -> None:
    gate = TicketGate(KEY, lambda: 1_700_000_000)
    _refused(gate, replace(_signed(TICKET), signature=bytes(32)))
    gate.admit(_signed(TICKET))


def test_rooms_are_forgotten_once_their_ticket_has_expired() -> None:
    now = 1_700_000_000.0
    gate = TicketGate(KEY, lambda: now)
    for step in range(2000):
        now += 1
        expires_at_ms = int(now * 1000) + 10_000
        gate.admit(_signed(replace(TICKET, room=step, expires_at_ms=expires_at_ms)))
        assert len(gate._rooms) <= 12
    replayed = _signed(replace(TICKET, room=1995, expires_at_ms=int((now + 100) * 1000)))
    assert _refused(gate, replayed) == "ticket.room"


def test_keys_are_hex_and_long_enough() -> None:
    assert TicketKey.from_hex(SECRET.hex()).genuine(_signed(TICKET))
    for text in ("xyz", "", "00" * 31):
        with pytest.raises(ValueError, match=r"hexadecimal|32 bytes"):
            TicketKey.from_hex(text)


# ---- with engine data: version 2 of the signature

DATA = EngineData("sglang.nixl", b"\x00what prefill says")
WITH_DATA = replace(TICKET, engine_data=DATA)


def test_the_signature_of_a_known_ticket_with_engine_data() -> None:
    """Worked out once with another tool, as the one above."""
    assert _documented_input(WITH_DATA).hex() == (
        "6d696c6c73747265616d2e76322e7469636b6574"
        "000f"
        "70726566696c6c2d302e68c3b67374"
        "2326"
        "0123456789abcdef"
        "00000000"
        "000001a3185c507b"
        "000b"
        "73676c616e672e6e69786c"
        "8c45b19403c32df2704ac43abc70d096d0fc7a93f3684bc0670692b96ab20ecc"
    )
    assert _signed(WITH_DATA).signature.hex() == (
        "2d00d26ce4dd14e1b4a2134a5b9548f7bf8ff6a7932ef69afbc1a407b4e1e485"
    )
    assert KEY.genuine(_signed(WITH_DATA))


@pytest.mark.parametrize(
    "other",
    [
        None,
        EngineData("sglang.nixl", b""),
        EngineData("sglang.nixl", b"\x00what prefill said"),
        EngineData("sglang", b"\x00what prefill says"),
        EngineData("", b""),
        EngineData("k" * 2**16, b""),
    ],
)
def test_other_engine_data_is_forgery(other: EngineData | None) -> None:
    assert not KEY.genuine(replace(_signed(WITH_DATA), engine_data=other))
    assert not KEY.genuine(replace(_signed(TICKET), engine_data=other or DATA))


def test_a_renewed_ticket_is_for_the_same_transfer() -> None:
    first = KEY.mint("host", 1234, 3, EngineData("kind", b""))
    assert first == _signed(first)
    old = replace(first, expires_at_ms=1)
    second = KEY.renew(old, DATA)
    assert second == _signed(replace(first, engine_data=DATA, expires_at_ms=second.expires_at_ms))
    assert second.expires_at_ms >= first.expires_at_ms
