"""Between requests a connection of HTTP/1.1 gives its parser back; within one it may not."""

from __future__ import annotations

import pytest

from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.transport.http1_requests import BrokenError, RequestReader

HEAD = b"POST /a HTTP/1.1\r\nHost: x\r\n"
LENGTH = HEAD + b"Content-Length: 3\r\n\r\nabc"
BODY = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n"
CHUNKED, TRAILED = BODY + b"\r\n", BODY + b"Host: y\r\nX: z\r\n\r\n"


@pytest.mark.parametrize("sent", [LENGTH, CHUNKED, TRAILED])
def test_a_request_may_come_with_rests_at_any_byte(sent: bytes) -> None:
    for at in range(len(sent)):
        reader = RequestReader(1 << 14, Ledger(1 << 20))
        for _ in range(2):  # the second one on the same connection
            for part in (sent[:at], sent[at:]):
                reader.take(part)
                reader.rest()
            request = reader.requests.pop(0)
            assert (request.verb, request.target, request.whole) == ("POST", b"/a", True), at
            assert b"".join(request.body) == b"abc", at
            assert request.value(b"host") + request.value(b"x") == "x", at
        assert not reader.begun


@pytest.mark.parametrize(
    ("begun", "piece"),
    [(b"0\r\n", b"X: y\r\n" * 100), (b"0\r\nX: ", b"y" * 600), (b"1;", b"y" * 600)],
    ids=["many trailers", "a long trailer", "a long chunk extension"],
)
def test_of_trailers_and_chunk_extensions_as_much_is_read_as_of_a_head(
    begun: bytes, piece: bytes
) -> None:
    reader = RequestReader(1 << 14, Ledger(1 << 20))
    reader.take(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n" + begun)
    for _ in range((1 << 14) // len(piece)):
        reader.take(piece)
    with pytest.raises(BrokenError, match="more than 16384 bytes") as refused:
        reader.take(piece)
    assert refused.value.status == 431
    assert len(reader.requests[0].headers) == 2  # none of the trailers
