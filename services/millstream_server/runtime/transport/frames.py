"""What the frames of a caller do to its connection and its RPCs; h2 reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from h2 import events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from millstream_server.runtime.errors import Code, StatusError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.cors import allowed, judge, preflight
from millstream_server.runtime.transport.headers import (
    ACCEPTED_ENCODINGS,
    RESPONSE,
    Header,
    MalformedError,
    NotGrpcError,
    RequestHead,
    check_trailers,
    read_head,
    status_headers,
)
from millstream_server.runtime.transport.http_stream import AnsweredStream, Asked, Http2Stream
from millstream_server.runtime.transport.inbox import is_known_encoding
from millstream_server.runtime.transport.probes import (
    PROBE_METHODS,
    PROBES,
    refusal,
    respond,
)
from millstream_server.runtime.transport.stream import Stream
from millstream_server.runtime.transport.web_requests import read_web
from millstream_server.runtime.transport.web_stream import WebStream, open_web

if TYPE_CHECKING:
    from millstream_server.runtime.transport.connection import Connection

log = get_log(__name__)

_MOST_STRIKES = 2
_TYPE = b"content-type"


def take_frame(connection: Connection, data: bytes) -> bool:
    """Take bytes, and act on the next frame; return False if none has come whole."""
    h2 = connection.h2
    try:
        if data:
            h2.reader.feed(data)
        found = h2.next_events()
        for event in found or ():
            act = _ACTIONS.get(event.__class__)
            if act is not None:
                act(connection, event)
        while h2.provoked_resets:
            h2.provoked_resets -= 1
            connection.count_reset()
    except ProtocolError as error:
        why = f"{error.__class__.__name__}: {error}"  # of some the text is a number alone
        log.debug("HTTP/2 error", peer=connection.peer, why=why)
        connection.fail(error.error_code, why)
    except Exception as error:  # noqa: BLE001 - a bug must end this connection only
        log.error("a connection failed", error=error, peer=connection.peer)
        connection.abort()
    else:
        return found is not None
    return False


def _request(connection: Connection, event: events.RequestReceived) -> None:
    stream_id = event.stream_id
    if not connection.h2.can_send(stream_id):
        return  # reset by bytes that came with it
    room = len(connection.streams) < connection.options.max_streams
    if not room or not connection.ending.takes(stream_id):
        connection.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        return
    head = _head(connection, event)
    if head is None:
        return
    if not is_known_encoding(head.encoding):
        headers = status_headers(Code.UNIMPLEMENTED, "unknown grpc-encoding", ())
        headers.append((b"grpc-accept-encoding", ACCEPTED_ENCODINGS))
        _refuse(connection, stream_id, headers)
        return
    connection.add(Stream(connection, stream_id, head, connection.server.find(head.path)))


def _not_grpc(
    connection: Connection, stream_id: int, fields: Sequence[Header], error: NotGrpcError
) -> None:
    endpoints, path = connection.server.endpoints, error.head.path.partition("?")[0]
    origins = connection.options.cors_origins
    refusal = judge(connection.options, error.method, path, fields)
    stream: WebStream | Http2Stream | None = None
    if (rpc := read_web(error.method, error.head.path, fields)) is not None:
        stream = open_web(WebStream, connection, stream_id, rpc, refusal)
    elif (response := preflight(origins, error.method, path, fields)) is not None:
        connection.add(AnsweredStream(connection, stream_id, response))
    elif endpoints is None or path in PROBES or not path:
        _answer_http(connection, stream_id, error)
    else:
        asked = Asked(error.method, error.head.path, error.head.metadata)
        stream = Http2Stream(connection, stream_id, asked, endpoints.find(error.method, path))
        stream.failure = refusal
    if stream is not None:
        stream.sender.cors = allowed(origins, fields)
        connection.add(stream)


def _malformed(connection: Connection, event: events.RequestReceived, error: StatusError) -> None:
    """Refuse a request whose headers break gRPC's rules, in the protocol that it has."""
    fields = dict(event.headers)
    verb, target = (fields.get(name, b"").decode("latin-1") for name in (b":method", b":path"))
    # No other header is looked at: they may be too many, and then they haven't been checked.
    rpc = read_web(verb, target, [(_TYPE, fields.get(_TYPE, b""))])
    if rpc is None:
        bad = error.code is Code.INVALID_ARGUMENT
        code = Code.INTERNAL if bad else error.code  # as grpc-go and grpc-core say
        _refuse(connection, event.stream_id, status_headers(code, error.message, ()))
        return
    rpc = replace(rpc, problem=error)
    connection.add(open_web(WebStream, connection, event.stream_id, rpc))


def _head(connection: Connection, event: events.RequestReceived) -> RequestHead | None:
    """Return the headers of an RPC; None: they were refused."""
    known = connection.h2.decoder.known
    if known is not None and known.head is not None:
        return known.head
    try:
        head = read_head(event.headers, connection.options.max_metadata_bytes)
    except MalformedError:
        connection.h2.reset_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
    except NotGrpcError as error:
        _not_grpc(connection, event.stream_id, event.headers, error)
    except StatusError as error:
        _malformed(connection, event, error)
    else:
        # h2 counts the bytes of a request that says how many it has.
        if known is not None and not any(name == b"content-length" for name, _ in event.headers):
            known.head = head
        return head
    return None


def _refuse(connection: Connection, stream_id: int, headers: Sequence[Header]) -> None:
    connection.h2.respond(stream_id, [*RESPONSE[:2], *headers], end_stream=True)
    connection.h2.ask_for_no_more(stream_id)


def _answer_http(connection: Connection, stream_id: int, error: NotGrpcError) -> None:
    if error.method in PROBE_METHODS:
        response = respond(error.method, error.head.path, "", connection.server.states)
    else:
        response = refusal(error.http_status, str(error))
    if error.method == "HEAD":
        response = replace(response, body=b"")
    connection.add(AnsweredStream(connection, stream_id, response))


def _data(connection: Connection, event: events.DataReceived) -> None:
    if not event.flow_controlled_length:
        return  # it only ends the stream
    # At once: a stream whose handler doesn't read must not stop the others.
    connection.h2.consumed(event.flow_controlled_length)
    stream = connection.streams.get(event.stream_id)
    if stream is not None:
        stream.received(event.data, event.flow_controlled_length)


def _trailers(connection: Connection, event: events.TrailersReceived) -> None:
    stream = connection.streams.get(event.stream_id)
    if stream is None:
        return
    try:
        check_trailers(event.headers, connection.options.max_metadata_bytes)
    except MalformedError:
        connection.h2.reset(stream.id, ErrorCodes.PROTOCOL_ERROR)
        stream.lost()


def _end(connection: Connection, event: events.StreamEnded) -> None:
    stream = connection.streams.get(event.stream_id)
    if stream is not None:
        stream.closed_by_client()


def _reset(connection: Connection, event: events.StreamReset) -> None:
    stream = connection.streams.get(event.stream_id)
    if stream is not None:
        stream.lost()
    if event.remote_reset:
        connection.count_reset()


def _window(connection: Connection, event: events.WindowUpdated) -> None:
    if not event.stream_id:
        connection.out.pump()
        return
    stream = connection.streams.get(event.stream_id)
    if stream is not None:
        stream.sender.window_grew()


def _settings(connection: Connection, event: events.RemoteSettingsChanged) -> None:
    if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
        for stream in list(connection.streams.values()):
            stream.sender.window_grew()


def _ping(connection: Connection, _: events.PingReceived) -> None:
    connection.strikes += connection.ending.is_early(connection.loop.time())
    if connection.strikes > _MOST_STRIKES:
        connection.enhance_your_calm("too_many_pings")


def _ping_ack(connection: Connection, event: events.PingAckReceived) -> None:
    connection.ending.acknowledged(event.ping_data)
    connection.end_if_unused()


def _goaway(connection: Connection, _: events.ConnectionTerminated) -> None:
    connection.ending.caller_leaves = True
    connection.end_if_unused()


_ACTIONS: dict[type, Callable[[Connection, Any], None]] = {
    events.RequestReceived: _request,
    events.DataReceived: _data,
    events.TrailersReceived: _trailers,
    events.StreamEnded: _end,
    events.StreamReset: _reset,
    events.WindowUpdated: _window,
    events.RemoteSettingsChanged: _settings,
    events.PingReceived: _ping,
    events.PingAckReceived: _ping_ack,
    events.ConnectionTerminated: _goaway,
}
"""By the class of h2's event; the others need none."""
