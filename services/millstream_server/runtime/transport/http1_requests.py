"""Requests of HTTP/1.1 as they come on a connection, parsed in slices by httptools (llhttp).

It refuses what two parsers might read differently: two lengths, a length beside chunks, bare line
feeds, folded headers, blanks in names (RFC 9112, 11.2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
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
_AROUND_A_BYTE = 16
"""Of chunks' sizes and extensions, for each byte of a body; chunks of one byte have five."""
_is_host = re.compile(rb"(\[[\w.:%~-]+\]|[\w.~%!$&'()*+,;=-]*)(:[0-9]*)?", re.ASCII).fullmatch
"""RFC 9110, 7.2: no blanks, no user, no path."""


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
    upgrades: bool = False
    """It asks for another protocol: nothing behind it is read before its response."""
    body: list[bytes] = field(default_factory=list)
    """What came and wasn't passed on: before it was its turn, or in this slice."""
    stream: Stream | None = None
    """Set when it is its turn."""

    def value(self, name: bytes) -> str:
        """Return a header's value; several are joined, as HTTP has it."""
        return b", ".join([v for n, v in self.headers if n == name]).decode("latin-1")

    @property
    def waits(self) -> bool:
        """Whether the client sends the body only when it is told to."""
        return not self.whole and self.value(b"expect").lower() == "100-continue"

    def pass_on(self) -> None:
        """Give what has come to the stream."""
        if self.stream is None:
            return
        for part in self.body:
            self.stream.received(part, 0)
        self.body.clear()
        if self.whole:
            self.stream.closed_by_client()

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
        if hosts and not _is_host(hosts[0].rstrip(b" \t")):
            raise BrokenError(400, "the request isn't HTTP/1.1: its Host is no host")
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
        """Of the head begun, or of chunks' sizes and extensions, and trailers. Same bound."""
        self._allowed_bytes = 0
        """So many of the slice don't count for it: those of a head, and some for each of a body."""
        self._unread = bytearray()
        self._parser: Any = None
        """Made when it is needed: it takes a kilobyte."""
        self._parts: list[bytes] = []
        """Of the last request's body, in this slice."""
        self.on_body = self._parts.append  # no function of Python, for chunks of one byte

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
            if len(self._unread) > (0 if self.requests[0].upgrades else _MOST_AHEAD_BYTES):
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
        before, self._allowed_bytes = len(self.requests), 0
        if self._parser is None:
            self._parser = httptools.HttpRequestParser(self)
        try:
            try:
                self._parser.feed_data(part)
            except httptools.HttpParserUpgrade as upgrade:
                self._ignore_upgrade(part[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._parts.clear()
            self._fail(BrokenError(400, "the request isn't HTTP/1.1 as it should be"))
        self._end_part()
        if not self.requests or self.requests[-1].whole:
            self._head_bytes = 0
        else:
            held = len(part) + (self._head_bytes if len(self.requests) == before else 0)
            self._head_bytes = max(0, held - self._allowed_bytes)
        if self._head_bytes > self._most_head_bytes:
            self._fail(_too_long(self._most_head_bytes))
        if self.requests:
            self.requests[0].pass_on()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Go on behind the head of a request that asks for another protocol (RFC 9110, 7.8).

        llhttp takes its body for the other protocol's, so another parser reads it, as that of a
        request which has nothing but the framing and ends the connection.
        """
        request = self.requests[-1]
        request.upgrades, request.whole = True, False
        kept = (b"content-length", b"transfer-encoding")
        framing = [b"%b: %b\r\n" % each for each in request.headers if each[0] in kept]
        reads = SimpleNamespace(on_body=self.on_body, on_message_complete=self._upgrade_ignored)
        parser = self._parser = httptools.HttpRequestParser(reads)
        parser.feed_data(b"POST / HTTP/1.1\r\nConnection: close\r\n%b\r\n" % b"".join(framing))
        parser.feed_data(rest)

    def _upgrade_ignored(self) -> None:
        self.on_message_complete()
        self._parser = None

    def _fail(self, error: BrokenError) -> None:
        first = self.first
        if first is None or not first.whole:
            raise error
        self._stop_reading()  # what came before it is still served

    # ---- the parser's callbacks

    def on_message_begin(self) -> None:
        self.requests.append(Request())
        self._allowed_bytes = 0

    def on_url(self, url: bytes) -> None:
        self.requests[-1].target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.requests[-1].verb:  # trailers are dropped
            self.requests[-1].headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._allowed_bytes = _SLICE_BYTES + self._most_head_bytes
        request, parser = self.requests[-1], self._parser
        request.verb = parser.get_method().decode("ascii")
        request.version = parser.get_http_version()
        request.keeps = parser.should_keep_alive() and request.version != "1.0"

    def on_message_complete(self) -> None:
        self._end_part()
        self.requests[-1].whole = True

    def _end_part(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._allowed_bytes += _AROUND_A_BYTE * len(data)
            self.requests[-1].body.append(data)
