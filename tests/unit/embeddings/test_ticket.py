"""Embedding tickets against the words of media.proto."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac

import pytest

from millstream.v1 import media_pb2, tensor_pb2
from millstream_server.encode.transfer import ticket as module
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.generation.ticket import TicketKey
from millstream_server.media.items import Content, EmbeddingTicket, EncodedItem, Geometry, Modality
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.runtime.errors import InvalidRequestError

SECRET = bytes(range(32))
NOW_S = 1_799_999_999.5
TICKETS = EmbeddingTickets(TicketKey(SECRET), now=lambda: NOW_S)
KNOWN = EmbeddingTicket(
    address="höst:9",
    lease="ab",
    tensor=TensorSpec(ElementType.BFLOAT16, (3, 4096)),
    content=Content.PIXELS,
    expires_at_ms=1_800_000_000_123,
)
SIGNED_BYTES = bytes.fromhex(
    "6d696c6c73747265616d2e76312e656d62656464696e67"  # millstream.v1.embedding
    "0007" + "68c3b673743a39"  # 7 bytes: höst:9
    "0002" + "6162"  # 2 bytes: ab
    "00000002"  # ELEMENT_TYPE_BFLOAT16
    "0002" + "00000003" + "00001000"  # rank 2: 3, 4096
    "00000002"  # EMBEDDING_CONTENT_PIXELS
    "000001a3185c507b"  # 1800000000123
)
ITEM = EncodedItem(
    modality=Modality.IMAGE,
    digest=b"d" * 32,
    tokens=3,
    geometry=Geometry(),
    tensor=TensorSpec(ElementType.FLOAT32, (3, 8)),
    content=Content.ROWS,
    lease="0" * 32,
)


def refused(ticket: EmbeddingTicket, tickets: EmbeddingTickets = TICKETS) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        tickets.check(ticket)
    (violation,) = caught.value.violations
    return violation.field


def test_the_bytes_that_are_signed() -> None:
    signature = hmac.new(SECRET, SIGNED_BYTES, hashlib.sha256).digest()
    TICKETS.check(dataclasses.replace(KNOWN, signature=signature))


def test_the_numbers_are_those_of_the_contract() -> None:
    for kind, number in module._ELEMENTS.items():
        assert tensor_pb2.ElementType.Value(f"ELEMENT_TYPE_{kind.name}") == number
    for content, number in module._CONTENTS.items():
        assert media_pb2.EmbeddingContent.Value(f"EMBEDDING_CONTENT_{content.name}") == number
    assert set(module._ELEMENTS) == set(ElementType)
    assert set(module._CONTENTS) == set(Content)


def test_a_minted_ticket_is_accepted_again_and_again() -> None:
    ticket = TICKETS.mint("encode:9000", ITEM)
    assert (ticket.address, ticket.lease, ticket.tensor) == ("encode:9000", ITEM.lease, ITEM.tensor)
    assert ticket.expires_at_ms == 1_800_000_059_500
    TICKETS.check(ticket)
    TICKETS.check(ticket)


@pytest.mark.parametrize(
    "change",
    [
        {"address": "encode:9001"},
        {"lease": "1" * 32},
        {"tensor": TensorSpec(ElementType.BFLOAT16, (3, 8))},
        {"tensor": TensorSpec(ElementType.FLOAT32, (8, 3))},
        {"tensor": TensorSpec(ElementType.FLOAT32, (3, 8, 1))},
        {"content": Content.PIXELS},
        {"expires_at_ms": 1_800_000_059_501},
        {"signature": b""},
        {"signature": bytes(32)},
        {"expires_at_ms": -1},
        {"address": "x" * 65_536},
        {"address": "\ud800"},
        {"tensor": TensorSpec(ElementType.FLOAT32, (1 << 32,))},
    ],
)
def test_every_field_is_signed(change: dict[str, object]) -> None:
    ticket = TICKETS.mint("encode:9000", ITEM)
    assert refused(dataclasses.replace(ticket, **change)) == "ticket.signature"  # type: ignore[arg-type]


def test_another_key() -> None:
    other = EmbeddingTickets(TicketKey(bytes(32)))
    assert refused(other.mint("encode:9000", ITEM)) == "ticket.signature"


def test_an_expired_ticket() -> None:
    ticket = TICKETS.mint("encode:9000", ITEM)
    at_the_end = EmbeddingTickets(TicketKey(SECRET), now=lambda: ticket.expires_at_ms / 1000)
    at_the_end.check(ticket)
    late = EmbeddingTickets(TicketKey(SECRET), now=lambda: ticket.expires_at_ms / 1000 + 0.002)
    assert refused(ticket, late) == "ticket.expires_at"


def test_a_kv_ticket_signs_other_bytes() -> None:
    """The first bytes of both differ, so that one's signature is never another's."""
    assert not SIGNED_BYTES.startswith(b"millstream.v1.ticket")
