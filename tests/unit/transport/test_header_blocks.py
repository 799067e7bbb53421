"""Header blocks that are kept mean what they would if they were read and made anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from hpack import Decoder, Encoder

from millstream_server.runtime.transport.h2_state import ServerState
from millstream_server.runtime.transport.options import TransportOptions

Headers = list[tuple[bytes, bytes]]
_NAMES = [b":path", b"te", b"authorization", b"grpc-timeout", b"x-request"]


def _state() -> ServerState:
    return ServerState(TransportOptions(max_receive_bytes=1), lambda _: None)


def _blocks(seed: int) -> list[Headers]:
    """Make blocks that come again, with values of which a table of 200 bytes holds few."""
    chance = random.Random(seed)
    values = [b"a", b"b", b"c" * 40, b"d" * 90, b"e" * 300]
    known = [
        [(chance.choice(_NAMES), chance.choice(values)) for _ in range(chance.randint(1, 5))]
        for _ in range(8)
    ]
    return [chance.choice(known) for _ in range(400)]


def _plain(headers: object) -> Headers:
    return [(bytes(name), bytes(value)) for name, value in headers]  # type: ignore[attr-defined]


@pytest.mark.parametrize("table_bytes", [0, 64, 200, 4096])
def test_blocks_of_requests(table_bytes: int) -> None:
    encoder, decoder = Encoder(), _state().decoder
    encoder.header_table_size = table_bytes
    for headers in _blocks(table_bytes):
        assert _plain(decoder.decode(encoder.encode(headers), raw=True)) == headers


@pytest.mark.parametrize("table_bytes", [0, 64, 200, 4096])
def test_blocks_of_responses(table_bytes: int) -> None:
    encoder, decoder = _state().encoder, Decoder()
    decoder.max_allowed_table_size = decoder.header_table_size = 4096
    chance = random.Random(1)
    for headers in _blocks(table_bytes + 1):
        if chance.random() < 0.05:
            encoder.header_table_size = chance.choice([table_bytes, 64, 4096])
        assert _plain(decoder.decode(encoder.encode(headers), raw=True)) == headers


def _count(monkeypatch: pytest.MonkeyPatch, of: type, name: str) -> list[object]:
    calls: list[object] = []
    original: Callable[..., object] = getattr(of, name)

    def counted(self: object, given: object, more: bool = False) -> object:  # noqa: FBT001, FBT002
        calls.append(given)
        return original(self, given, more)

    monkeypatch.setattr(of, name, counted)
    return calls


def test_the_same_again_is_neither_made_nor_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, read = _count(monkeypatch, Encoder, "encode"), _count(monkeypatch, Decoder, "decode")
    sender, receiver = _state().encoder, _state().decoder
    headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]
    for _ in range(5):
        assert _plain(receiver.decode(sender.encode(headers), raw=True)) == headers
    assert (len(made), len(read)) == (2, 2), "the first one changes the tables"


def test_little_is_kept() -> None:
    """33 bytes may name thousands of headers."""
    encoder, decoder = Encoder(), _state().decoder
    for number in range(100):
        decoder.decode(encoder.encode([(b":path", b"%d" % number)]), raw=True)
    decoder.decode(encoder.encode([(b":method", b"POST")] * 65), raw=True)
    kept = cast("Any", decoder)._kept
    assert len(kept) <= 16
    assert all(len(headers) <= 64 for headers in kept.values())
