"""What the frames of a caller do to its connection and its RPCs; h2 reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from h2 import events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.ending import DRAIN_PING
from millstream_server.runtime.transport.headers import MalformedError, check_trailers
from millstream_server.runtime.transport.requests import open_stream

if TYPE_CHECKING:
    from millstream_server.runtime.transport.connection import Connection

log = get_log(__name__)


def take_frame(connection: Connection, data: bytes) -> bool:
    """Take bytes, and act on the next frame; return False if none has come whole."""
    try:
        if data:
            connection.h2.reader.feed(data)
        return _take_next(connection)
    except ProtocolError as error:
        why = f"{error.__class__.__name__}: {error}"  # of some the text is a number alone
        log.debug("HTTP/2 error", peer=connection.peer, why=why)
        connection.fail(error.error_code, why)
    except Exception as error:  # noqa: BLE001 - a bug must end this connection only
        log.error("a connection failed", error=error, peer=connection.peer)
        connection.abort()
    return False


def _take_next(connection: Connection) -> bool:
    h2 = connection.h2
    found = h2.next_events()
    if found is None:
        return False
    # h2 has acknowledged and applied new settings: the acknowledgement goes before responses that
    # make use of them.
    connection.out.collect()
    for event in found:
        act = _ACTIONS.get(event.__class__)
        if act is not None:
            act(connection, event)
    while h2.provoked_resets:
        h2.provoked_resets -= 1
        _count_reset(connection)
    return True


def _request(connection: Connection, event: events.RequestReceived) -> None:
    stream = open_stream(connection, event)
    if stream is not None:
        connection.add(stream)


def _data(connection: Connection, event: events.DataReceived) -> None:
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
        connection.reset(stream, ErrorCodes.PROTOCOL_ERROR)
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
        _count_reset(connection)


def _count_reset(connection: Connection) -> None:
    if not connection.resets.take(connection.loop.time()):
        connection.enhance_your_calm("too many requests were reset")


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
    if connection.keepalive.too_many_pings(connection.loop.time()):
        connection.enhance_your_calm("too_many_pings")


def _ping_ack(connection: Connection, event: events.PingAckReceived) -> None:
    if event.ping_data == DRAIN_PING:
        connection.ending.refuse_new()
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
