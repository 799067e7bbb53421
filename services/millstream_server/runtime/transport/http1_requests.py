"""Requests of HTTP/1.1 as they come on a connection, parsed in slices by httptools (llhttp).

It refuses what two parsers might read differently: two lengths, a length beside chunks, bare line
feeds, folded headers, blanks in names (RFC 9112, 11.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httptools

from millstream_server.runtime.rpc.ledger import Holder, Ledger
from millstream_server.runtime.transport.stream import Stream

_SLICE_BYTES = 16 << 10
"""Parsed at once: some hundred of the shortest requests, in about a millisecond."""
_MOST_AHEAD_BYTES = 64 << 10
"""Of requests that are sent before the response of the one before them; few clients do that."""
_NOT_COUNTED_BYTES = 1024
_VERSIONS = ("1.0", "1.1")


class BrokenError(Exception):
    """What came is no request that can be served; nothing behind it can be read."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(slots=True)
class Request:
    """A request as far as it was parsed."""

    target: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Names are lower case."""
    verb: str = ""
    """Empty until the head is there."""
    version: str = ""
    keeps: bool = False
    """Its client lets the connection stay open."""
    whole: bool = False
    body: list[bytes] = field(default_factory=list)
    """What came before it was its turn."""
    stream: Stream | None = None
    """Set when it is its turn."""

    def value(self, name: bytes) -> str:
        """Return a header's value; several are joined, as HTTP has it."""
        return b", ".join([v for n, v in self.headers if n == name]).decode("latin-1")

    @property
    def waits(self) -> bool:
        """Whether the client sends the body only when it is told to."""
        return not self.whole and self.value(b"expect").lower() == "100-continue"

    def serve(self, stream: Stream) -> None:
        """Give what has come and what comes to ``stream``."""
        self.stream = stream
        for part in self.body:
            stream.received(part, 0)
        self.body.clear()
        if self.whole:
            stream.closed_by_client()

    def check(self, most_head_bytes: int) -> None:
        """Check what the parser doesn't.

        Raises:
            BrokenError: the head breaks a rule.
        """
        if len(self.target) + sum([len(n) + len(v) for n, v in self.headers]) > most_head_bytes:
            raise _too_long(most_head_bytes)
        if self.version not in _VERSIONS:
            raise BrokenError(505, "the request isn't HTTP/1.1")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.version != "1.0"):
            raise BrokenError(400, "the request isn't HTTP/1.1: it needs one Host header")
        coding = self.value(b"transfer-encoding")
        if self.version == "1.0" and coding:
            raise BrokenError(400, "the request isn't HTTP/1.0: that has no Transfer-Encoding")
        if coding and coding.lower() != "chunked":
            raise BrokenError(501, "of transfer codings this server has chunked alone")


def _too_long(most_bytes: int) -> BrokenError:
    return BrokenError(431, f"the request's headers or trailers have more than {most_bytes} bytes")


class RequestReader:
    """Parses what comes. The first of `requests` is served; those behind it wait."""

    def __init__(self, most_head_bytes: int, received: Ledger) -> None:
        """Take heads of up to ``most_head_bytes``; `count` what isn't parsed in ``received``."""
        self.requests: list[Request] = []
        self.counted_bytes = 0
        """Of the head or the trailers begun, and of what waits behind a request."""
        self.deaf = False
        """What comes is dropped."""
        self._most_head_bytes = most_head_bytes
        self._received = received
        self._head_bytes = 0
        """Of the head begun, or since a part of the body: chunks' sizes, trailers. Same bound."""
        self._advanced = False
        """Of the last request, the slice had the end of the head or a part of the body."""
        self._unread = bytearray()
        self._parser: Any = None
        """Made when it is needed: it takes a kilobyte."""

    @property
    def first(self) -> Request | None:
        return self.requests[0] if self.requests else None

    @property
    def begun(self) -> bool:
        """Whether a request has begun to come."""
        return bool(self.requests or self._head_bytes)

    def close(self, holder: Holder) -> None:
        """Forget all; nothing can be taken any more."""
        self.deaf = True
        self.requests.clear()
        self._unread = bytearray()
        self._head_bytes = 0
        self.count(holder)
        self.rest()

    def rest(self) -> None:
        """Give the parser back between requests; it knows this object."""
        if all(request.whole for request in self.requests) and not self._head_bytes:
            self._parser = None

    def count(self, holder: Holder) -> None:
        """Count what isn't parsed in the bound of all."""
        held = len(self._unread) + self._head_bytes
        held = held if held > _NOT_COUNTED_BYTES else 0
        more, self.counted_bytes = held - self.counted_bytes, held
        if more > 0:
            self._received.add(holder, more)
        elif more:
            self._received.remove(holder, -more)

    def take(self, data: bytes) -> bool:
        """Parse a slice of what came; return whether there is more that can be parsed now.

        Raises:
            BrokenError: it can't be parsed.
        """
        if self.deaf:
            return False
        self._unread += data
        if self._must_wait:
            if len(self._unread) > _MOST_AHEAD_BYTES:
                self._stop_reading()
        elif self._unread:
            part = bytes(self._unread[:_SLICE_BYTES])
            del self._unread[:_SLICE_BYTES]
            self._parse(part)
        return bool(self._unread) and not self._must_wait

    @property
    def _must_wait(self) -> bool:
        return bool(self.requests) and self.requests[0].whole

    def _stop_reading(self) -> None:
        """Drop what comes; the connection closes behind the first request's response."""
        self.deaf = True
        self._unread = bytearray()
        while len(self.requests) > 1:
            self.requests.pop()
        if self.requests:
            self.requests[0].keeps = False

    def _parse(self, part: bytes) -> None:
        before, self._advanced = len(self.requests), False
        if self._parser is None:
            self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            # It may be ignored; what follows may not be HTTP/1.1.
            self.deaf = True
            self.requests[-1].keeps = False
        except httptools.HttpParserError:
            self._fail(BrokenError(400, "the request isn't HTTP/1.1 as it should be"))
        last = self.requests[-1] if self.requests else None
        if last is None or last.whole or self._advanced:
            self._head_bytes = 0
            return
        self._head_bytes = len(part) + (self._head_bytes if len(self.requests) == before else 0)
        if self._head_bytes > self._most_head_bytes:
            self._fail(_too_long(self._most_head_bytes))

    def _fail(self, error: BrokenError) -> None:
        first = self.first
        if first is None or not first.whole:
            raise error
        self._stop_reading()  # what came before it is still served

    # ---- the parser's callbacks

    def on_message_begin(self) -> None:
        self.requests.append(Request())
        self._advanced = False

    def on_url(self, url: bytes) -> None:
        self.requests[-1].target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.requests[-1].verb:  # trailers are dropped
            self.requests[-1].headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._advanced = True
        request, parser = self.requests[-1], self._parser
        request.verb = parser.get_method().decode("ascii")
        request.version = parser.get_http_version()
        request.keeps = parser.should_keep_alive() and request.version != "1.0"

    def on_body(self, data: bytes) -> None:
        self._advanced = True
        request = self.requests[-1]
        if request.stream is not None:
            request.stream.received(data, 0)
        else:
            request.body.append(data)

    def on_message_complete(self) -> None:
        request = self.requests[-1]
        request.whole = True
        if request.stream is not None:
            request.stream.closed_by_client()
