"""HPACK blocks that are kept, and headers that are sent once."""

from __future__ import annotations

import pytest
from hpack import Decoder

from millstream_server.runtime.transport.hpack_blocks import KeepingEncoder

HEAD = [(b":status", b"200"), (b"content-type", b"application/json")]


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 5000])
def test_headers_sent_once_are_read_and_change_no_table(length: int) -> None:
    encoder, decoder = KeepingEncoder(), Decoder()
    decoder.decode(encoder.encode(HEAD))
    before = encoder.encode(HEAD)
    once = [(b"x-request-id", b"a" * length)]
    assert decoder.decode(before + encoder.encode_once(once), raw=True) == HEAD + once
    assert encoder.encode(HEAD) == before
    assert decoder.decode(before, raw=True) == HEAD
