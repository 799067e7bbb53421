"""How a request's headers become a `Stream`, or are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from h2.errors import ErrorCodes
from h2.events import RequestReceived

from millstream_server.runtime.errors import Code
from millstream_server.runtime.transport.framing import is_known_encoding
from millstream_server.runtime.transport.headers import (
    ACCEPTED_ENCODINGS,
    RESPONSE,
    BadHeadersError,
    Header,
    MalformedError,
    NotGrpcError,
    RequestHead,
    read_head,
    status_headers,
)
from millstream_server.runtime.transport.ports.probes import refusal, respond
from millstream_server.runtime.transport.stream import Stream

if TYPE_CHECKING:
    from millstream_server.runtime.transport.connection import Connection


def open_stream(connection: Connection, event: RequestReceived) -> Stream | None:
    """Return the RPC of a request; None: it was refused, or reset by bytes that came with it."""
    stream_id = event.stream_id
    if not connection.h2.can_send(stream_id):
        return None
    if not connection.takes(stream_id):
        connection.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        return None
    head = _read(connection, event)
    if head is None:
        return None
    if not is_known_encoding(head.encoding):
        headers = status_headers(Code.UNIMPLEMENTED, "unknown grpc-encoding", ())
        headers.append((b"grpc-accept-encoding", ACCEPTED_ENCODINGS))
        _refuse(connection, stream_id, headers)
        return None
    return Stream(connection, stream_id, head, connection.parts.find(head.path))


def _read(connection: Connection, event: RequestReceived) -> RequestHead | None:
    """Return the headers of an RPC; None: they were refused."""
    try:
        return read_head(event.headers, connection.options.max_metadata_bytes)
    except MalformedError:
        connection.h2.reset_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
    except NotGrpcError as error:
        _answer_http(connection, event.stream_id, error)
    except BadHeadersError as error:
        _refuse(connection, event.stream_id, status_headers(error.status, error.message, ()))
    return None


def _refuse(connection: Connection, stream_id: int, headers: Sequence[Header]) -> None:
    connection.h2.send_headers(stream_id, [*RESPONSE[:2], *headers], end_stream=True)
    connection.h2.ask_for_no_more(stream_id)


def _answer_http(connection: Connection, stream_id: int, error: NotGrpcError) -> None:
    if error.reads:
        response = respond(error.method, error.path, "", connection.parts.states)
    else:
        response = refusal(error.http_status, str(error))
    headers = [(b":status", b"%d" % response.status)]
    headers += [(name.encode(), value.encode()) for name, value in response.headers]
    h2, body = connection.h2, b"" if error.method == "HEAD" else response.body
    fits = 0 < len(body) <= h2.local_flow_control_window(stream_id)
    h2.send_headers(stream_id, headers, end_stream=not fits)
    if fits:
        h2.send_data(stream_id, body, end_stream=True)
    connection.h2.ask_for_no_more(stream_id)
