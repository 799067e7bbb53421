"""An RPC of gRPC-web or Connect: served as one of gRPC, with other frames around its messages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, TypeVar

from millstream_server.runtime.errors import Failure, StatusError
from millstream_server.runtime.rpc import json_messages
from millstream_server.runtime.rpc.call import Source
from millstream_server.runtime.rpc.connect import HttpRefusalError
from millstream_server.runtime.rpc.served_call import CallOverError
from millstream_server.runtime.rpc.serving import Method
from millstream_server.runtime.transport.headers import RequestHead
from millstream_server.runtime.transport.http1_output import Http1Sender
from millstream_server.runtime.transport.http_stream import Body, BodySender
from millstream_server.runtime.transport.inbox import END, Inbox, unpacked
from millstream_server.runtime.transport.output import Serialize
from millstream_server.runtime.transport.stream import Life, Stream
from millstream_server.runtime.transport.web_framing import ConnectStream
from millstream_server.runtime.transport.web_requests import (
    STREAM_TYPES,
    UNARY_TYPES,
    WebRequest,
    unknown_type,
)

S = TypeVar("S", bound="WebStream")


def open_web(
    kind: type[S],
    connection: Any,
    stream_id: int,
    asked: WebRequest,
    refusal: StatusError | None = None,
) -> S:
    """Make the stream of an RPC, of a ``kind``; with a ``refusal`` it isn't served."""
    path = asked.head.path
    method = connection.server.find(path)
    if refusal is not None:
        asked = replace(asked, problem=None)
    elif asked.problem is None and connection.server.serves(path):
        refusal = _misfit(asked, method)
    stream = kind(connection, stream_id, asked, method)
    stream.failure = refusal
    return stream


def _misfit(asked: WebRequest, method: Method) -> HttpRefusalError | None:
    """Return why a method isn't called like this, if it isn't."""
    unary = method.lone and not method.response_streaming
    if isinstance(asked.framing, ConnectStream) and unary:
        return unknown_type(UNARY_TYPES)
    if asked.framing.whole and not unary:
        return unknown_type(STREAM_TYPES)
    return None


async def _over(_response: object) -> None:
    raise CallOverError


class WholeBody(Body):
    """A body that is one message, maybe compressed."""

    __slots__ = ()

    def end(self) -> None:
        if self._encoding != b"identity" and self._buffer:
            try:
                self._buffer = bytearray(unpacked(bytes(self._buffer), self._encoding, self._most))
            except StatusError as error:
                self.begun, self._buffer = True, bytearray()
                self._messages.append(error)
                return
        super().end()


class JsonInbox(Inbox):
    """Messages of JSON; what a thread converts counts, too, since it may wait for others'."""

    kind: Any = None
    """The class of messages; None: they stay as they are."""
    converting = 0
    """Bytes of what is being converted."""

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + self.converting

    def drop(self) -> None:
        self.converting = 0
        super().drop()

    async def read(self) -> Any:
        data = await super().read()
        if data is END:
            return data
        self.converting = len(data)
        self.count()
        try:
            return await json_messages.parsed(self.kind, data, self._connection.server.pool)
        finally:
            self.converting = 0
            self.count()


class JsonBody(JsonInbox, WholeBody):
    """A body that is one message of JSON."""


class WebStream(Stream):
    """A `Call`. Its end is a part of the body: it may have to wait for room as messages do."""

    __slots__ = ("_asked", "_body", "_framing", "_last", "_woken")

    sender: BodySender

    def __init__(self, connection: Any, stream_id: int, asked: WebRequest, method: Method) -> None:
        """Serve what was ``asked`` for by ``method``."""
        self._asked, self._framing = asked, asked.framing
        self._body = b""
        """Of a unary call of Connect: its trailers come before it."""
        self._last: bytes | None = None
        """What ends the response; None: the handler runs."""
        super().__init__(connection, stream_id, asked.head, method)
        self.sender.headers = self._framing.headers(())
        self.sender.more = not self._framing.whole
        if self._framing.json:
            self._woken = asyncio.Event()
            self.write = self._write_json
            self.send_from, self.ready = self._send_json_from, self._woken.set
        elif self._framing.whole:
            self.write = self._keep

    def _make_parts(self, connection: Any, head: RequestHead, method: Method) -> None:
        most = method.max_request_bytes or connection.options.max_receive_bytes
        framing, serialize = self._framing, method.serialize
        given = (connection, self.id, head.encoding, most)
        if framing.json:
            self.inbox = inbox = (JsonBody if framing.whole else JsonInbox)(*given, bytes)
            inbox.kind = method.request_type
            self.sender = self._make_sender(connection, framing.message)
        else:
            self.inbox = (WholeBody if framing.whole else Inbox)(*given, method.parse)
            self.inbox.descriptor = method.descriptor
            self.sender = self._make_sender(connection, lambda m: framing.message(serialize(m)))

    def _make_sender(self, connection: Any, serialize: Serialize) -> BodySender:
        return BodySender(connection, connection.h2.streams[self.id], self.id, serialize)

    # ---- its life --------------------------------------------------------------------------------

    def start(self) -> None:
        if self._asked.problem is not None:
            self._cut(self._asked.problem)
        else:
            super().start()

    def _serve(self) -> None:
        self._life = Life.SERVED
        serving = self._serve_to_the_end()
        self._task = self._connection.loop.create_task(serving, context=self._context)
        self._task.add_done_callback(self._served)

    async def _serve_to_the_end(self) -> None:
        await self._method.serve(self, begun=True)
        if self._last is not None and not self.is_over:
            await self.sender.end_with(self._last)
            self._end()

    def complete(self) -> None:
        if self.is_over:
            return
        if self._framing.whole:
            self.sender.headers = self._framing.headers(self.trailers)
            self._last = self._body
        else:
            self._last = self._framing.end(self.trailers)

    async def abort(self, failure: Failure) -> None:
        if self.is_over:
            raise CallOverError
        if self.sender.status and not self.sender.torn:
            self._last = self._framing.refuse(failure, self.trailers).event
        else:
            self._send_failure(failure)

    def _send_failure(self, failure: Failure) -> None:
        """Send a failure now; what has begun and lacks the room for its end is cut."""
        if self.is_over:
            return
        refusal = self._framing.refuse(failure, self.trailers)
        if self.sender.status:
            self.sender.break_off(refusal.event)
        else:
            headers = (("content-type", refusal.content_type), *refusal.headers)
            self.sender.refuse(refusal, headers)
        self._end()

    def fail(self, failure: Failure) -> None:
        if self._last is None or self.is_over:
            super().fail(failure)
        else:  # the handler has ended, and the end waits for room
            self.sender.drop()
            self._cut(failure)

    def _end(self) -> None:
        super()._end()
        # They know this object: without the cycle it goes now, not at a garbage collection.
        self.write = self.send_from = _over

    # ---- what comes ------------------------------------------------------------------------------

    def received(self, data: bytes, nbytes: int) -> None:
        if self._asked.problem is not None:
            return  # it is said when the RPC starts
        try:
            data = self._framing.read(data)
        except StatusError as error:
            self.fail(error)
            return
        super().received(data, nbytes)

    def closed_by_client(self) -> None:
        if not self._framing.whole:
            super().closed_by_client()
            return
        if not self.inbox.ended:
            self._body_came()
        self._wake()

    # ---- what is sent ----------------------------------------------------------------------------

    async def _keep(self, response: Any) -> None:
        self._body = self._method.serialize(response)

    async def _write_json(self, response: Any) -> None:
        data = await json_messages.made(response, self._connection.server.pool)
        if self._framing.whole:
            self._body = data
        else:
            await self.sender.write(data)

    async def _send_json_from(self, source: Source) -> None:
        """See `Call.send_from`; JSON may take long to make, which isn't done while frames are."""
        while not source.over:
            await self._woken.wait()
            self._woken.clear()
            message = source.next()
            if message is not None:
                source.gathers = True
                await self._write_json(message)


class Http1WebStream(WebStream):
    """One on HTTP/1.1."""

    __slots__ = ()

    def _make_sender(self, connection: Any, serialize: Serialize) -> BodySender:
        chunks = connection.request.version != "1.0"
        return Http1Sender(connection, self.id, serialize, chunks=chunks)
