"""What a connection of HTTP/1.1 sends: heads, and bodies whole or in chunks (RFC 9112)."""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

from millstream_server.runtime.rpc.http import Headers, Refusal
from millstream_server.runtime.transport.http_stream import BodySender
from millstream_server.runtime.transport.output import NoWindow, Serialize
from millstream_server.runtime.transport.probes import ProbeResponse

if TYPE_CHECKING:
    from millstream_server.runtime.transport.http1 import Http1Connection

_LAST_CHUNK = b"0\r\n\r\n"
_PART_BYTES = 64 << 10
"""Written at once: a caller that reads slowly has no more than a few of them in its socket."""
_CHUNKED = ("transfer-encoding", "chunked")


class _Date:
    """The header that each response has; made once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def __call__(self) -> str:
        now = int(time.time())
        if now != self._second:
            self._second, self._text = now, formatdate(now, usegmt=True)
        return self._text


_date = _Date()


def reason(status: int) -> str:
    """Return the words of a status; empty if HTTP has none for it."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def head(status: int, headers: Headers, *, closes: bool) -> bytes:
    """Make a response's head; ``closes``: the connection ends behind it."""
    lines = [f"HTTP/1.1 {status} {reason(status)}", f"date: {_date()}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if closes:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def whole(response: ProbeResponse, *, bare: bool = False, closes: bool) -> bytes:
    """Make a response with its body; ``bare``: to HEAD; ``closes``: the connection ends behind."""
    headers = [*response.headers, ("content-length", str(len(response.body)))]
    if closes:
        # `upgrade` must be named here (RFC 9110, 7.8).
        named = [name for name, _ in response.headers if name == "upgrade"]
        headers.append(("connection", ", ".join(["close", *named])))
    begun = head(response.status, headers, closes=False)
    return begun if bare else begun + response.body


class Http1Sender(BodySender):
    """Sends a response: its length is said where its first piece is its last, else in chunks."""

    __slots__ = ("_bare", "_chunked", "_finished", "_http1")

    def __init__(
        self, connection: Http1Connection, stream_id: int, serialize: Serialize = bytes,
        *, bare: bool = False, chunks: bool,
    ) -> None:  # fmt: skip
        """``bare``: without a body, as the method is HEAD; ``chunks``: the client knows them."""
        super().__init__(connection, NoWindow(), stream_id, serialize)
        self._http1 = connection
        self._bare = bare
        self._chunked = chunks
        """Else the end of the connection is that of the body, as HTTP/1.0 has it."""
        self._finished = False

    def send_whole(self, data: bytes) -> bool:
        out = self._http1.out
        if out.blocked or len(data) > _PART_BYTES:
            return False
        out.send(self._framed(data))
        return True

    def send_part(self) -> bool:
        """Send what waits; the connection calls it when the socket has room."""
        if not self.unsent:
            self.pull()
        rest = self.unsent
        if rest:
            self._http1.out.send(bytes(rest[:_PART_BYTES]))
            self.unsent = rest[_PART_BYTES:]
            if self.unsent:
                return True
            self._uncount()
            if self._source is None or self._source.over:
                self._end(None)
                return False
        return self.asked

    def _framed(self, data: bytes) -> bytes:
        """Make a piece of the response: with the head before its first, the end behind its last."""
        last = not self.more and (self._source is None or self._source.over)
        begins = not self._begun
        self._finished = last
        if begins:
            self._begun, self.status = True, 200
            if last:
                length = ("content-length", str(len(data)))
                return self._head(200, (*self.headers, length)) + self._body(data)
            headers = (*self.headers, _CHUNKED) if self._chunked else self.headers
            begun = self._head(200, headers)
        else:
            begun = b""
        if self._bare:
            return begun
        if not self._chunked:
            return begun + data
        return b"%b%x\r\n%b\r\n%b" % (begun, len(data), data, _LAST_CHUNK if last else b"")

    def _head(self, status: int, headers: Headers) -> bytes:
        return head(status, (*headers, *self.once, *self.cors), closes=self._http1.closes())

    def _body(self, data: bytes) -> bytes:
        return b"" if self._bare else data

    def _send_headers(self, *_: object, **__: object) -> None:
        """Do nothing: `_framed` makes the head."""

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        if not self._begun:
            self._begun, self.status = True, 200
            self._http1.out.send(self._head(200, (*self.headers, ("content-length", "0"))))
        elif self._chunked and not self._bare:
            self._http1.out.send(_LAST_CHUNK)

    async def end_with(self, data: bytes) -> None:
        self._source, self.more = None, False
        if self._begun and not data:
            self.finish()
        elif not self.send_whole(data):
            await self._send_held(data)

    def refuse(self, refusal: Refusal, headers: Headers) -> None:
        self._begun = self._finished = True
        self.status = refusal.status
        length = ("content-length", str(len(refusal.body)))
        self._http1.out.send(
            self._head(refusal.status, (*headers, length)) + self._body(refusal.body)
        )

    def break_off(self, event: bytes) -> None:
        if self.torn or self._finished or not event:
            self.reset()
        else:
            self._source, self.more = None, False  # so it is framed as the last
            self._http1.out.send(self._framed(event))

    def reset(self) -> None:
        """Cut the connection: a response that has begun and has no end can't be told otherwise."""
        self._http1.abort()
