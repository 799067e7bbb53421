"""Cases of streams: their states, flow control, and what a request may say."""

from __future__ import annotations

import struct
from collections.abc import Callable

import hpack

from tests.contract.transport.case import (
    CHAT,
    CLOSED,
    FLOW_CONTROL,
    MAX_WINDOW,
    PROTOCOL,
    UNARY,
    Case,
    Scope,
    connection_error,
    fine,
    finished,
    hang,
    open_stream,
    stream_error,
)
from tests.support.wire.raw_http2 import (
    ACK,
    END_HEADERS,
    PREFACE,
    PRIORITY,
    ErrorCode,
    Kind,
    Wire,
    data,
    frame,
    goaway,
    message,
    ping,
    request_fields,
    reset,
    settings,
    window_update,
)


def _request(*more: tuple[str, str], **changed: str | None) -> Callable[[Wire], bytes]:
    """Send a request with changed headers, and its one message."""

    def script(wire: Wire) -> bytes:
        wire.next_stream = 3
        fields = [*request_fields(UNARY, **changed), *more]
        return wire.headers(1, fields) + data(1, message(b""), end=True)

    return script


def _before(field: tuple[str, str]) -> Callable[[Wire], bytes]:
    """Send a request with a field before all others."""

    def script(wire: Wire) -> bytes:
        wire.next_stream = 3
        return wire.headers(1, [field, *request_fields(UNARY)])

    return script


def _depending_on_itself(wire: Wire) -> bytes:
    wire.next_stream = 3
    block = struct.pack(">LB", 1, 0) + wire.block(request_fields(CHAT))
    return frame(Kind.HEADERS, 1, block, END_HEADERS | PRIORITY)


STATES = [
    connection_error("5.1 DATA on an idle stream", PROTOCOL, lambda _: data(1, b"x")),
    connection_error("6.4 RST_STREAM on an idle stream", PROTOCOL, lambda _: reset(1)),
    connection_error(
        "6.9 WINDOW_UPDATE on an idle stream", PROTOCOL, lambda _: window_update(1, 1)
    ),
    fine("6.3 PRIORITY on an idle stream", lambda _: frame(Kind.PRIORITY, 7, bytes(4) + b"\x10")),
    fine("5.1 WINDOW_UPDATE on a half-closed stream", lambda w: hang(w) + window_update(1, 9)),
    stream_error("5.1 DATA after END_STREAM", CLOSED, lambda w: hang(w) + data(1, b"x")),
    stream_error(
        "5.1 HEADERS after END_STREAM", CLOSED, lambda w: hang(w) + w.headers(1, [], end=True)
    ),
    Case(
        "5.1 HEADERS on a closed stream",
        Scope.CONNECTION,
        CLOSED,
        finished(lambda w: w.headers(1, request_fields(UNARY))),
    ),
    # A connection error (5.1); h2 is milder.
    Case("5.1 DATA on a closed stream", Scope.STREAM, CLOSED, finished(lambda _: data(1, b"x"))),
    Case(
        "5.1 WINDOW_UPDATE on a closed stream",
        Scope.NOTHING,
        None,
        finished(lambda _: window_update(1, 1)),
    ),
    Case("5.1 RST_STREAM on a closed stream", Scope.NOTHING, None, finished(lambda _: reset(1))),
    Case(
        "5.1 PRIORITY on a closed stream",
        Scope.NOTHING,
        None,
        finished(lambda _: frame(Kind.PRIORITY, 1, bytes(5))),
    ),
    stream_error(
        "5.1 DATA after RST_STREAM", CLOSED, lambda w: open_stream(w) + reset(1) + data(1, b"x")
    ),
    stream_error(
        "5.1 HEADERS after RST_STREAM",
        CLOSED,
        lambda w: open_stream(w) + reset(1) + w.headers(1, [("a", "b")], end=True),
    ),
    connection_error("5.1.1 an even stream id", PROTOCOL, lambda w: open_stream(w, 2)),
    connection_error(
        "5.1.1 a stream id lower than another's",
        PROTOCOL,
        lambda w: open_stream(w, 5) + open_stream(w, 3),
    ),
    # RFC 9113 says nothing of it any more: gRPC's C core and Go ignore it, too.
    fine(
        "5.3 PRIORITY that depends on itself",
        lambda w: open_stream(w) + frame(Kind.PRIORITY, 1, struct.pack(">LB", 1, 0)),
    ),
    fine("5.3 HEADERS that depend on themselves", _depending_on_itself),
]

FLOW = [
    connection_error(
        "6.9 an increment of 0 on the connection", PROTOCOL, lambda _: window_update(0, 0)
    ),
    stream_error(
        "6.9 an increment of 0 on a stream",
        PROTOCOL,
        lambda w: open_stream(w) + window_update(1, 0),
    ),
    connection_error(
        "6.9.1 a connection's window above the largest",
        FLOW_CONTROL,
        lambda _: window_update(0, MAX_WINDOW),
    ),
    stream_error(
        "6.9.1 a stream's window above the largest",
        FLOW_CONTROL,
        lambda w: open_stream(w) + window_update(1, MAX_WINDOW),
    ),
    connection_error(
        "6.9.2 a stream's window above the largest by SETTINGS",
        FLOW_CONTROL,
        lambda w: open_stream(w) + window_update(1, 1000) + settings({4: MAX_WINDOW}),
    ),
    # To be ignored (6.9); h2 takes it for a part of the number.
    connection_error(
        "6.9 the reserved bit of an increment", PROTOCOL, lambda _: window_update(0, (1 << 31) + 1)
    ),
]


def _reset_at_once(sent: bytes) -> Callable[[Wire], bytes]:
    """Open an RPC in the first 1024 bytes and reset it in the next: the server reads as many."""

    def script(wire: Wire) -> bytes:
        begun = PREFACE + settings()
        block = wire.block([*request_fields(CHAT), ("x", "")])
        room = 1024 - len(begun) - 9 - len(block)
        wire.encoder = hpack.Encoder()
        opened = wire.headers(1, [*request_fields(CHAT), ("x", "y" * (room - 2))])
        assert len(begun + opened) == 1024
        wire.next_stream = 3
        more = b"".join(open_stream(wire, n) + reset(n) for n in range(3, 203, 2))
        return begun + opened + data(1, sent) + reset(1) + more

    return script


def _at_once(name: str, sent: bytes) -> Case:
    return Case(name, Scope.NOTHING, None, _reset_at_once(sent), first=b"")


CONNECTION = [
    _at_once("5.4.2 RPCs that are reset before they begin", b""),
    _at_once("5.4.2 likewise, with half a message", message(b"", length=1000)),
    _at_once("5.4.2 likewise, with a message that is too long", message(b"", length=1 << 30)),
    fine("6.7 an acknowledgement of no PING", lambda _: ping(ack=True)),
    fine("6.5 an acknowledgement of no SETTINGS", lambda _: frame(Kind.SETTINGS, flags=ACK)),
    fine("7 an unknown error code in RST_STREAM", lambda w: open_stream(w) + reset(1, 0xEEEE)),
    Case(
        "6.8 GOAWAY with an error",
        Scope.CLOSED,
        None,
        lambda _: goaway(0, ErrorCode.INTERNAL_ERROR),
    ),
]

REQUESTS = [
    fine("8.2 the plain request", _request()),
    fine("8.3 host for :authority", _request(("host", "localhost"), authority=None)),
    fine("8.2.3 cookies apart", _request(("cookie", "a=b"), ("cookie", "c=d"))),
    fine("8.2.2 te: trailers", _request(te="trailers")),
    fine("8.1.1 content-length as long as the body", _request(("content-length", "5"))),
    *(
        stream_error(name, PROTOCOL, _request(*more, **changed))
        for name, more, changed in (
            ("8.2.1 upper case in a name", [("X-Upper", "1")], {}),
            ("8.2.1 a blank in a name", [("a b", "1")], {}),
            ("8.2.1 a colon in a name", [("a:b", "1")], {}),
            ("8.2.1 an empty name", [("", "1")], {}),
            ("8.2.1 a NUL in a value", [("a", "x\0y")], {}),
            ("8.2.1 a line's end in a value", [("a", "x\r\ny: z")], {}),
            ("8.2.1 a blank before a value, and a NUL", [("a", " x\0")], {}),
            ("8.2.2 connection", [("connection", "keep-alive")], {}),
            ("8.2.2 keep-alive", [("keep-alive", "1")], {}),
            ("8.2.2 proxy-connection", [("proxy-connection", "1")], {}),
            ("8.2.2 transfer-encoding", [("transfer-encoding", "chunked")], {}),
            ("8.2.2 upgrade", [("upgrade", "h2c")], {}),
            ("8.2.2 te: gzip", [], {"te": "gzip"}),
            ("8.3 a pseudo header behind others", [(":method", "POST")], {"method": None}),
            ("8.5 CONNECT with :path", [], {"method": "CONNECT"}),
            ("8.3 no :method", [], {"method": None}),
            ("8.3 no :scheme", [], {"scheme": None}),
            ("8.3 no :path", [], {"path": None}),
            ("8.3 an empty :path", [], {"path": ""}),
            ("8.3.1 host other than :authority", [("host", "elsewhere")], {}),
        )
    ),
    *(
        stream_error(name, PROTOCOL, _request(("content-length", length)))
        for name, length in (
            ("8.1.1 content-length below the body's", "4"),
            ("8.1.1 content-length above the body's", "6"),
            ("8.1.1 content-length that is no number", "five"),
        )
    ),
    *(
        stream_error(name, PROTOCOL, _before(more))
        for name, more in (
            ("8.3 :method twice", (":method", "POST")),
            ("8.3 :path twice", (":path", UNARY)),
            ("8.3 an unknown pseudo header", (":unknown", "1")),
            ("8.3 a response's pseudo header", (":status", "200")),
        )
    ),
]

TRAILERS = [
    fine("8.1 trailers", lambda w: open_stream(w) + w.headers(1, [("a", "b")], end=True)),
    stream_error(
        "8.1 trailers without END_STREAM",
        PROTOCOL,
        lambda w: open_stream(w) + w.headers(1, [("a", "b")]),
    ),
    stream_error(
        "8.1 a pseudo header in trailers",
        PROTOCOL,
        lambda w: open_stream(w) + w.headers(1, [(":path", UNARY)], end=True),
    ),
    stream_error(
        "8.1 trailers of more than 16 KiB",
        PROTOCOL,
        lambda w: open_stream(w) + w.headers(1, [("a", "b")] * 500, end=True),
    ),
    stream_error(
        "8.1 DATA behind trailers",
        CLOSED,
        lambda w: (
            open_stream(w, 1, UNARY)
            + data(1, message(b"hang"))
            + w.headers(1, [("a", "b")], end=True)
            + data(1, b"x")
        ),
    ),
]

STREAM_CASES = [*STATES, *FLOW, *CONNECTION, *REQUESTS, *TRAILERS]
