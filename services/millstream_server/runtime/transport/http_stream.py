"""A request of HTTP that isn't gRPC: one body in, one response out, whole or in pieces.

`HttpStream` is served as an RPC is. On HTTP/2 it is a stream (`Http2Stream`), on HTTP/1.1 the one
request that a connection serves at a time (`http1`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h2.errors import ErrorCodes

from millstream_server.runtime.errors import Failure
from millstream_server.runtime.rpc.http import (
    EVENTS,
    JSON,
    REQUEST_ID,
    BodyTooLargeError,
    Endpoint,
    Headers,
    Refusal,
    request_id_of,
)
from millstream_server.runtime.rpc.serving import Method, Rpcs
from millstream_server.runtime.transport.headers import Header, RequestHead
from millstream_server.runtime.transport.inbox import Inbox
from millstream_server.runtime.transport.output import Sender, Serialize
from millstream_server.runtime.transport.probes import ProbeResponse
from millstream_server.runtime.transport.stream import Life, Stream

_OF_EVENTS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))
"""Proxies, nginx among them, then pass each event on at once."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The head of a request."""

    verb: str
    target: str
    """The path with its query."""
    metadata: list[tuple[str, str | bytes]]
    """Its headers; names are lower case."""


class Body(Inbox):
    """A request's body: one message, which is whole when the caller's side ends."""

    __slots__ = ()

    def feed(self, data: bytes, nbytes: int) -> int:
        """See `Inbox`; no bytes complete it.

        Raises:
            BodyTooLargeError: it is too large.
        """
        self._uncredited += nbytes
        if len(self._buffer) + len(data) > self._most:
            raise BodyTooLargeError(self._most)
        self._buffer += data
        return 0

    def end(self) -> None:
        self.begun = True
        self._messages.append(bytes(self._buffer))
        self._message_bytes += len(self._buffer)
        self._buffer = bytearray()
        self.count()


class HttpStream(Stream):
    """A `runtime.rpc.http.HttpCall`."""

    __slots__ = ("path", "query", "refuse", "request_id", "route", "verb")

    sender: BodySender

    def __init__(
        self,
        connection: Any,
        stream_id: int,
        asked: Asked,
        found: tuple[Endpoint, Method],
    ) -> None:
        """Serve a request by what was ``found`` for it."""
        endpoint, method = found
        self.verb, self.route = asked.verb, endpoint.path
        self.path, _, self.query = asked.target.partition("?")
        self.request_id = request_id_of(asked.metadata)
        self.refuse = endpoint.refuse
        super().__init__(connection, stream_id, RequestHead(method.name, metadata=asked.metadata),
                         method)  # fmt: skip
        self.respond(JSON)
        self.sender.once = ((REQUEST_ID, self.request_id),)

    def respond(self, content_type: str, headers: Headers = ()) -> None:
        more = _OF_EVENTS if content_type == EVENTS else headers
        self.sender.headers = (("content-type", content_type), *more)

    def add_header(self, name: str, value: str) -> None:
        self.sender.headers = (*self.sender.headers, (name, value))

    @property
    def status(self) -> int:
        return self.sender.status

    def closed_by_client(self) -> None:
        if not self.inbox.ended:
            self._body_came()
        self._wake()

    def complete(self) -> None:
        if not self.is_over:
            self.sender.finish()
            self._end()

    def _send_failure(self, failure: Failure) -> None:
        if self.is_over:
            return
        refusal = self.refuse(failure)
        if self.sender.status:
            events = self.sender.headers[0][1] == EVENTS
            self.sender.break_off(refusal.event if events else b"")
        else:
            headers = (("content-type", refusal.content_type), *refusal.headers)
            self.sender.refuse(refusal, headers)
        self._end()


class BodySender(Sender):
    """Sends a response of HTTP/2: a head, then its body as it comes, in frames that fit."""

    __slots__ = ("cors", "headers", "more", "once", "status", "torn")

    def __init__(
        self, connection: Any, window: Any, stream_id: int, serialize: Serialize = bytes
    ) -> None:
        """``serialize`` makes a piece of the body of what `write` and sources give."""
        super().__init__(connection, window, stream_id, serialize)
        self.headers: Headers = ()
        """Of a response that is good."""
        self.once: Headers = ()
        """For any response; their values are of this one only."""
        self.status = 0
        """That was sent; 0: none was."""
        self.torn = False
        """The caller has a part of a piece whose rest was dropped."""
        self.more = False
        """Whatever is written, more follows: `end_with` ends the response."""
        self.cors: Headers = ()
        """For all responses, if a browser asks for another site."""

    def send_whole(self, data: bytes) -> bool:
        """Send a piece as one frame; return False if the windows or the socket lack room."""
        if self._connection.out.blocked or len(data) > self._room:
            return False
        if not self._begun:
            self._send_headers()
        self._send_frame(data)
        return True

    def _framed(self, data: bytes) -> bytes:
        return data

    def drop(self) -> None:
        self.torn |= bool(self.unsent)
        super().drop()

    def _send_headers(
        self, headers: Sequence[Header] = (), once: Sequence[Header] = (), *, end: bool = False
    ) -> None:
        self.status = self.status or 200
        headers = headers or self._fields(self.status, self.headers)
        super()._send_headers(headers, once or _encoded(self.once), end=end)

    def _fields(self, status: int, headers: Headers) -> list[Header]:
        """Make HTTP/2's fields of a response's head."""
        return [(b":status", b"%d" % status), *_encoded((*headers, *self.cors))]

    async def end_with(self, data: bytes) -> None:
        """Send the last piece, when there is room for it."""
        if not self._begun:
            self._send_headers(end=not data)
        if self._fits(data):
            self._end_stream(data)
            return
        await self._send_held(data)
        self._end_stream()

    async def _send_held(self, data: bytes) -> None:
        self._sent = self._connection.loop.create_future()
        self._hold(data)
        await self._all_sent(self._sent)

    def finish(self) -> None:
        """End a good response."""
        if not self._begun:
            self._send_headers(end=True)
        else:
            self._end_stream()

    def refuse(self, refusal: Refusal, headers: Headers) -> None:
        """Send a failure's response, whole, or its head where the window is too small for it."""
        self.status = refusal.status
        if not self._fits(refusal.body):
            self._send_headers(self._fields(refusal.status, headers), end=True)
            return
        length = ("content-length", str(len(refusal.body)))
        self._send_headers(self._fields(refusal.status, (*headers, length)))
        self._end_stream(refusal.body)

    def break_off(self, event: bytes) -> None:
        """End a response that has begun: with an event that says why, if there is one."""
        if self.torn or not event or not self._fits(event):
            self._connection.h2.reset(self._id, ErrorCodes.CANCEL)
        else:
            self._end_stream(event)

    def _fits(self, data: bytes) -> bool:
        return len(data) <= self._room

    def _end_stream(self, data: bytes = b"") -> None:
        h2 = self._connection.h2
        if not h2.can_send(self._id):
            return
        h2.end(self._id, data)
        h2.ask_for_no_more(self._id)


def _encoded(headers: Headers) -> list[Header]:
    return [(name.encode(), value.encode()) for name, value in headers]


class Http2Stream(HttpStream):
    """A request on HTTP/2."""

    __slots__ = ()

    def _make_parts(self, connection: Any, head: RequestHead, method: Method) -> None:
        most = method.max_request_bytes or connection.options.max_receive_bytes
        self.inbox = Body(connection, self.id, b"identity", most, method.parse)
        self.sender = BodySender(connection, connection.h2.streams[self.id], self.id)


class AnsweredStream(Stream):
    """A request on HTTP/2 whose response is known: none of it is read, and no layer is entered."""

    __slots__ = ("_response",)

    sender: BodySender

    def __init__(self, connection: Any, stream_id: int, response: ProbeResponse) -> None:
        super().__init__(connection, stream_id, RequestHead(""), _NO_METHOD)
        self._response = response
        self.sender.status, self.sender.headers = response.status, response.headers

    def _make_parts(self, connection: Any, _head: RequestHead, method: Method) -> None:
        self.inbox = Body(connection, self.id, b"identity", 0, method.parse)
        self.inbox.ended = True
        self.sender = BodySender(connection, connection.h2.streams[self.id], self.id)

    def start(self) -> None:
        """Send the response; what the windows have no room for waits, as long as a request may."""
        if self.is_over:
            return
        self._life, self.ending = Life.SERVED, True
        loop = self._connection.loop
        self._timer = loop.call_later(self._connection.options.first_message_s, self.fail)
        self._task = loop.create_task(self.sender.end_with(self._response.body))
        self._task.add_done_callback(self._served)

    def fail(self, _failure: Failure | None = None) -> None:
        self.lost()
        self.sender.reset()


_NO_METHOD = Rpcs().method("", None)
