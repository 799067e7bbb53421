"""A connection of HTTP/1.1: requests one after another, each served as an RPC is."""

from __future__ import annotations

import contextlib
import math
import random
import select
from typing import TYPE_CHECKING, Any

from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.rpc.ledger import Place
from millstream_server.runtime.rpc.serving import Method
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.connection_base import BaseConnection
from millstream_server.runtime.transport.cors import allowed, judge, preflight
from millstream_server.runtime.transport.headers import RequestHead
from millstream_server.runtime.transport.http1_output import Http1Sender, whole
from millstream_server.runtime.transport.http1_requests import (
    BrokenError,
    Request,
    RequestReader,
)
from millstream_server.runtime.transport.http_stream import Asked, Body, HttpStream
from millstream_server.runtime.transport.intake import STREAM_S, Intake
from millstream_server.runtime.transport.output import NoWindow
from millstream_server.runtime.transport.probes import PROBES, ProbeResponse, refusal, respond
from millstream_server.runtime.transport.sockets import peer_has_closed
from millstream_server.runtime.transport.stream import Stream
from millstream_server.runtime.transport.web_requests import read_web
from millstream_server.runtime.transport.web_stream import Http1WebStream, open_web

if TYPE_CHECKING:
    from millstream_server.runtime.transport.server import H2Server

log = get_log(__name__)

_IDLE_S = 620.0
"""Longest time without a request. Load balancers keep idle connections for 60 to 600 s, and must be
the ones that close them: else a request may be on its way when the server does."""
_LEAVING_IDLE_S = 1.0
"""The same in a drain, for clients that no response has told of it: one may be sending."""
_LINGER_S = 1.0
"""How long what still comes is read and dropped: closing with unread bytes resets the connection,
and a client may lose the response."""
_DROPS_S = 0.01
"""Between two reads that are dropped: else who sends without end holds others up."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_ALPN = b"PRI * HTTP/2"


class Http1Connection(BaseConnection):
    """Serves a connection: `streams` has the one request that is served, if any.

    To its stream it is what `connection.Connection` is to one of HTTP/2.
    """

    def __init__(self, server: H2Server, place: Place) -> None:
        """See `BaseConnection`."""
        super().__init__(server, place)
        self.h2 = NoWindow()
        place.give_up = self.abort
        now_s = self.loop.time()
        self._intake = Intake(self.loop, self.bounds.work, self._take, self._start, self._goes_last)
        self._reader = RequestReader(self.options.max_metadata_bytes, self.bounds.received)
        self._starting: Stream | None = None
        self._last_id = 0
        self._since_s = now_s
        """Since when no request is served, or one has begun to come."""
        age_s = self.options.max_connection_age_s * random.uniform(0.9, 1.1)  # noqa: S311
        self._leaves_s = now_s + age_s if age_s else math.inf
        self._aged = self._told = False
        """The next response says that the connection ends behind it; one has said so."""

    # ---- the socket ------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.out.open(transport, self.h2)
        self._intake.open(transport, self.caller_key)
        self.server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self.bounds.taken_bytes += len(data)
        if self._reader.deaf:
            self._transport.pause_reading()
            self.loop.call_later(_DROPS_S, self._read_on)
        elif data.startswith(_NO_ALPN) and not self._last_id:
            self._answer(refusal(400, "HTTP/2 over TLS needs the ALPN protocol h2"))
        else:
            self._intake.take(data)

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        for stream in self.streams.values():
            self.server.lost(stream)
        self._unstuck()
        self.out.close()
        self.server.forget(self)
        self._place.free()

    def abort(self) -> None:
        self._stop()
        self._unstuck()
        self._transport.abort()

    shed_head = abort

    @property
    def head_bytes(self) -> int:
        return self._reader.counted_bytes

    def _stop(self) -> None:
        self._ended = True
        self._intake.stop()
        self._reader.close(self)

    def _close(self, *, linger: bool = False) -> None:
        """Close behind what is to be sent; ``linger``: the caller may still be sending."""
        if self._ended:
            return
        self._stop()
        self.out.flush()
        if linger and self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the caller has reset it
                self._transport.write_eof()
        else:
            self._transport.close()
        self.loop.call_later(_LINGER_S, self._transport.abort)

    # ---- requests --------------------------------------------------------------------------------

    def _take(self, data: bytes) -> bool:
        """Take a slice of what came; return whether there is more to take."""
        begun = self._reader.begun
        try:
            self._begin_next()  # what was parsed behind the last one
            more = self._reader.take(data)
            self._begin_next()
        except BrokenError as error:
            self._refuse(error)
            return False
        except Exception as error:  # noqa: BLE001 - a bug must end this connection only
            log.error("a connection failed", error=error, peer=self.peer)
            self.abort()
            return False
        if not begun:
            self._since_s = self.loop.time()
        self._reader.count(self)  # it may end this connection
        return more

    def _refuse(self, error: BrokenError) -> None:
        stream = next(iter(self.streams.values()), None)
        if stream is None:
            self._answer(refusal(error.status, str(error)))
            return
        self._reader.deaf = True
        stream.fail(InvalidRequestError(f"the body can't be read: {error}"))

    def _begin_next(self) -> None:
        """Begin to serve the first request whose head is there, if none is served.

        Raises:
            BrokenError: its head breaks a rule.
        """
        request = self._reader.first
        if self.streams or request is None or not request.verb:
            return
        request.check(self.options.max_metadata_bytes)
        target, endpoints = request.target.decode("latin-1"), self.server.endpoints
        path, content_type = target.partition("?")[0], request.value(b"content-type")
        refusal = judge(self.options, request.verb, path, request.headers)
        rpc = read_web(request.verb, target, request.headers)
        if rpc is not None:
            self._last_id += 1
            self._serve(request, open_web(Http1WebStream, self, self._last_id, rpc, refusal))
            return
        allowing = preflight(self.options.cors_origins, request.verb, target, request.headers)
        if allowing is not None:
            self.out.send(whole(allowing, closes=self.closes()))
            self._go_on()
            return
        if endpoints is None or path in PROBES or content_type.startswith("application/grpc"):
            self._answer(respond(request.verb, target, content_type, self.server.states))
            return
        self._last_id += 1
        headers: list[tuple[str, str | bytes]] = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers
        ]
        asked = Asked(request.verb, target, headers)
        stream = Http1Stream(self, self._last_id, asked, endpoints.find(request.verb, path))
        stream.failure = refusal
        self._serve(request, stream)

    def _serve(self, request: Request, stream: Http1Stream | Http1WebStream) -> None:
        stream.sender.cors = allowed(self.options.cors_origins, request.headers)
        self._starting = self.streams[stream.id] = stream
        self.bounds.streams.add(self)
        self._place.mark_used()
        request.stream = stream
        request.pass_on()

    def _start(self) -> float:
        """Start the request that has begun; return about how long, in seconds, its work takes."""
        work_s, self.work_begun_s = self.work_begun_s, 0.0
        stream, self._starting = self._starting, None
        if stream is None:
            return work_s
        stream.start()
        request = self._reader.first
        if request is not None and request.stream is stream and request.waits:
            self.out.send(_CONTINUE)
        return work_s + STREAM_S

    def _answer(self, answer: ProbeResponse) -> None:
        """Answer the first request without serving it, and close."""
        request = self._reader.first
        bare = request is not None and request.verb == "HEAD"
        self.out.send(whole(answer, bare=bare, closes=True))
        self._close(linger=request is None or not request.whole)

    # ---- for its stream, as `Connection` ---------------------------------------------------------

    @property
    def request(self) -> Request:
        """The request that is served."""
        return self._reader.requests[0]

    def closes(self) -> bool:
        """Decide whether the connection ends behind the response that begins, which says so."""
        request = self._reader.first
        keeps = request is not None and request.keeps and request.whole
        self._told |= self._aged or self.server.leaving or not keeps
        return self._told

    def over(self, stream_id: int) -> None:
        """Go on with the next request, or close, if the response was sent."""
        stream = self.streams.get(stream_id)
        if stream is None or not stream.is_over:
            return  # ended for a bound: its response follows
        del self.streams[stream_id]
        self.bounds.streams.remove(self)
        if self._ended:
            return
        self._place.mark_unused()
        self._go_on()

    def _go_on(self) -> None:
        """Go on behind the first request's response."""
        request = self._reader.requests.pop(0)
        self._since_s = self.loop.time()
        if self._told or not (request.keeps and request.whole):
            self._close(linger=True)
        else:
            self.loop.call_soon(self._intake.take, b"")

    # ---- the end ---------------------------------------------------------------------------------

    @property
    def takes_no_more(self) -> bool:
        """Whether no request will be served behind the open one."""
        return self._told or self._ended

    def drain(self) -> None:
        """Close if it is idle; call it until this is so: what comes before is served."""
        idle = self.loop.time() - self._since_s > _LEAVING_IDLE_S
        if idle and not peer_has_closed(self._transport, select.POLLIN):
            self.end_if_unused()

    def end_if_unused(self) -> None:
        """Close if no request is served or has begun to come."""
        if not self.streams and not self._reader.begun and not self._intake.waits:
            self._close(linger=True)

    def tick(self, now_s: float) -> None:
        """Check times; called about once a second."""
        self._aged |= now_s >= self._leaves_s
        self._end_silent(now_s)
        self._reader.rest()
        limit_s = self.options.headers_s if self._reader.begun else _IDLE_S
        if not self.streams and now_s - self._since_s > limit_s:
            self._close()


class Http1Stream(HttpStream):
    """A request on HTTP/1.1."""

    __slots__ = ()

    def _make_parts(self, connection: Any, head: RequestHead, method: Method) -> None:
        most = method.max_request_bytes or connection.options.max_receive_bytes
        self.inbox = Body(connection, self.id, b"identity", most, method.parse)
        request = connection.request
        bare, chunks = self.verb == "HEAD", request.version != "1.0"
        self.sender = Http1Sender(connection, self.id, bare=bare, chunks=chunks)
