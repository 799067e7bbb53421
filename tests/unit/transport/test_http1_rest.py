"""Between requests a connection of HTTP/1.1 gives its parser back; within one it may not."""

from __future__ import annotations

import pytest

from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.transport.http1_requests import RequestReader

HEAD = b"POST /a HTTP/1.1\r\nHost: x\r\n"
LENGTH = HEAD + b"Content-Length: 3\r\n\r\nabc"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"


@pytest.mark.parametrize("sent", [LENGTH, CHUNKED])
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
        assert not reader.begun
