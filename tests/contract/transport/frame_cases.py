"""Cases of frames: their sizes, padding, header blocks and SETTINGS."""

from __future__ import annotations

import struct
from collections.abc import Callable

from tests.contract.transport.case import (
    CHAT,
    FLOW_CONTROL,
    MAX_FRAME,
    MAX_WINDOW,
    PROTOCOL,
    SIZE,
    Case,
    Scope,
    connection_error,
    fine,
    open_stream,
    stream_error,
)
from tests.support.wire.raw_http2 import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PADDED,
    PREFACE,
    PRIORITY,
    ErrorCode,
    Kind,
    Setting,
    Wire,
    data,
    frame,
    ping,
    request_fields,
    reset,
    settings,
)


def _with(block: bytes, flags: int = END_HEADERS, stream: int = 1) -> Callable[[Wire], bytes]:
    """Send a header block as it is."""
    return lambda _: frame(Kind.HEADERS, stream, block, flags)


def _padded(kind: Kind, body: bytes, pad_length: int, flags: int) -> Callable[[Wire], bytes]:
    payload = bytes([pad_length]) + body
    return lambda wire: open_stream(wire) + frame(kind, 1, payload, flags | PADDED)


def _split_headers(wire: Wire, *between: bytes, stream: int = 1, end_headers: int = 1) -> bytes:
    """Open a stream with HEADERS and one CONTINUATION, and put frames between."""
    wire.next_stream = 3
    block = wire.block(request_fields(CHAT))
    tail = frame(Kind.CONTINUATION, stream, block[9:], END_HEADERS * end_headers)
    return frame(Kind.HEADERS, 1, block[:9]) + b"".join(between) + tail


def _oversized(kind: Kind, stream: int = 0) -> Callable[[Wire], bytes]:
    size = MAX_FRAME + 6 - (MAX_FRAME % 6)  # SETTINGS come in sixes
    return lambda wire: open_stream(wire) + frame(kind, stream, bytes(size))


PREFACES = [
    # The GOAWAY may be left out: a peer that sends this doesn't speak HTTP/2 (3.4).
    Case(
        "3.4 a preface that is wrong at its end",
        Scope.CLOSED,
        PROTOCOL,
        lambda _: b"",
        first=PREFACE[:-6] + b"XX\r\n\r\n" + settings(),
    ),
    Case(
        "3.4 TLS on a port without it",
        Scope.CLOSED,
        PROTOCOL,
        lambda _: b"",
        first=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    ),
    Case("3.4 nothing but zeros", Scope.CLOSED, PROTOCOL, lambda _: b"", first=bytes(100)),
    # A connection error (3.4); h2 serves it.
    Case("3.4 a preface without SETTINGS", Scope.NOTHING, None, lambda _: b"", first=PREFACE),
]

FRAMES = [
    fine("4.1 a frame of an unknown type", lambda _: frame(0xEE, 0, b"x") + frame(0xEE, 1)),
    fine("4.1 unknown flags", lambda _: frame(Kind.PING, 0, b"12345678", 0xFE)),
    fine(
        "4.1 the reserved bit of a stream id",
        lambda _: frame(Kind.PRIORITY, (1 << 31) + 9, bytes(5)),
    ),
    fine("4.2 a frame of the largest size", lambda w: open_stream(w) + data(1, bytes(MAX_FRAME))),
    connection_error("4.2 DATA beyond the largest size", SIZE, _oversized(Kind.DATA, 1)),
    connection_error("4.2 HEADERS beyond the largest size", SIZE, _oversized(Kind.HEADERS, 3)),
    connection_error("4.2 SETTINGS beyond the largest size", SIZE, _oversized(Kind.SETTINGS)),
    connection_error("4.2 GOAWAY beyond the largest size", SIZE, _oversized(Kind.GOAWAY)),
    connection_error(
        "4.2 an unknown frame beyond the largest size",
        SIZE,
        lambda _: frame(0xEE, 0, bytes(MAX_FRAME + 1)),
    ),
    connection_error(
        "4.2 a frame's head that promises 16 MB, without them",
        SIZE,
        lambda w: open_stream(w) + frame(Kind.DATA, 1, b"x", length=(1 << 24) - 1),
    ),
    connection_error("6.5 SETTINGS of 5 bytes", SIZE, lambda _: frame(Kind.SETTINGS, 0, bytes(5))),
    connection_error("6.7 PING of 7 bytes", SIZE, lambda _: frame(Kind.PING, 0, bytes(7))),
    connection_error("6.7 PING of 9 bytes", SIZE, lambda _: frame(Kind.PING, 0, bytes(9))),
    connection_error("6.8 GOAWAY of 7 bytes", SIZE, lambda _: frame(Kind.GOAWAY, 0, bytes(7))),
    connection_error(
        "6.4 RST_STREAM of 3 bytes",
        SIZE,
        lambda w: open_stream(w) + frame(Kind.RST_STREAM, 1, bytes(3)),
    ),
    connection_error(
        "6.4 RST_STREAM of 5 bytes",
        SIZE,
        lambda w: open_stream(w) + frame(Kind.RST_STREAM, 1, bytes(5)),
    ),
    connection_error(
        "6.9 WINDOW_UPDATE of 3 bytes", SIZE, lambda _: frame(Kind.WINDOW_UPDATE, 0, bytes(3))
    ),
    connection_error(
        "6.9 WINDOW_UPDATE of 5 bytes", SIZE, lambda _: frame(Kind.WINDOW_UPDATE, 0, bytes(5))
    ),
    stream_error("6.3 PRIORITY of 4 bytes", SIZE, lambda w: open_stream(w) + frame(2, 1, bytes(4))),
    stream_error("6.3 PRIORITY of 6 bytes", SIZE, lambda w: open_stream(w) + frame(2, 1, bytes(6))),
    # A stream that isn't open can't be reset (6.4).
    fine("6.3 PRIORITY of 4 bytes on an idle stream", lambda _: frame(Kind.PRIORITY, 1, bytes(4))),
    connection_error("6.1 DATA on the connection", PROTOCOL, lambda _: data(0, b"x")),
    connection_error("6.2 HEADERS on the connection", PROTOCOL, lambda w: w.headers(0, [])),
    connection_error("6.3 PRIORITY on the connection", PROTOCOL, lambda _: frame(2, 0, bytes(5))),
    connection_error("6.4 RST_STREAM on the connection", PROTOCOL, lambda _: reset(0)),
    connection_error("6.5 SETTINGS on a stream", PROTOCOL, lambda _: frame(Kind.SETTINGS, 1)),
    connection_error("6.7 PING on a stream", PROTOCOL, lambda _: frame(Kind.PING, 1, bytes(8))),
    connection_error("6.8 GOAWAY on a stream", PROTOCOL, lambda _: frame(Kind.GOAWAY, 1, bytes(8))),
    connection_error(
        "6.6 PUSH_PROMISE from a client",
        PROTOCOL,
        lambda w: (
            open_stream(w)
            + frame(Kind.PUSH_PROMISE, 1, struct.pack(">L", 2) + w.block([]), END_HEADERS)
        ),
    ),
]

PADDING = [
    fine("6.1 padded DATA", _padded(Kind.DATA, b"abc", 2, 0)),
    connection_error("6.1 padding as long as DATA", PROTOCOL, _padded(Kind.DATA, b"abc", 4, 0)),
    connection_error("6.1 padding longer than DATA", PROTOCOL, _padded(Kind.DATA, b"abc", 255, 0)),
    connection_error(
        "6.1 PADDED DATA without a byte", SIZE, lambda w: open_stream(w) + frame(0, 1, b"", PADDED)
    ),
    connection_error(
        "6.2 padding longer than HEADERS",
        PROTOCOL,
        lambda w: frame(
            Kind.HEADERS, 1, b"\xff" + w.block(request_fields(CHAT)), END_HEADERS | PADDED
        ),
    ),
    connection_error(
        "6.2 HEADERS too short for their priority", SIZE, _with(b"\0\0\0", END_HEADERS | PRIORITY)
    ),
]

HPACK = [
    connection_error("7541-6.1 index 0", ErrorCode.COMPRESSION_ERROR, _with(b"\x80")),
    connection_error(
        "7541-2.3.3 an index beyond the tables", ErrorCode.COMPRESSION_ERROR, _with(b"\xff\x7f")
    ),
    connection_error(
        "7541-4.2 a table size after a field", ErrorCode.COMPRESSION_ERROR, _with(b"\x82\x20")
    ),
    connection_error(
        "7541-6.3 a table size above the limit",
        ErrorCode.COMPRESSION_ERROR,
        _with(b"\x3f\xe2\xff\x0f"),
    ),
    connection_error(
        "7541-5.2 a string that ends too early", ErrorCode.COMPRESSION_ERROR, _with(b"\x00\x05ab")
    ),
    connection_error(
        "7541-5.2 Huffman padding longer than 7 bits",
        ErrorCode.COMPRESSION_ERROR,
        _with(b"\x00\x83\xff\xff\xff\x01a"),
    ),
    connection_error(
        "7541-5.2 Huffman padding of zeros",
        ErrorCode.COMPRESSION_ERROR,
        _with(b"\x00\x81\x00\x01a"),
    ),
    connection_error(
        "7541-5.1 a number without an end",
        ErrorCode.COMPRESSION_ERROR,
        _with(b"\x7f" + b"\xff" * 99),
    ),
    connection_error(
        "4.3 a bad block in trailers",
        ErrorCode.COMPRESSION_ERROR,
        lambda w: open_stream(w) + frame(Kind.HEADERS, 1, b"\x80", END_HEADERS | END_STREAM),
    ),
    connection_error(
        "4.3 a bad block on a stream that was reset",
        ErrorCode.COMPRESSION_ERROR,
        lambda w: (
            open_stream(w) + reset(1) + frame(Kind.HEADERS, 1, b"\x80", END_HEADERS | END_STREAM)
        ),
    ),
]

CONTINUATIONS = [
    connection_error(
        "10.5.1 a header block without an end",
        ErrorCode.ENHANCE_YOUR_CALM,
        lambda _: frame(Kind.HEADERS, 1) + frame(Kind.CONTINUATION, 1, bytes(MAX_FRAME)) * 17,
    ),
    connection_error(
        "10.5.1 a header block in frames without a byte",
        ErrorCode.ENHANCE_YOUR_CALM,
        lambda _: frame(Kind.HEADERS, 1) + frame(Kind.CONTINUATION, 1) * 64,
    ),
    connection_error(
        "10.5.1 headers of 320 KB",
        ErrorCode.ENHANCE_YOUR_CALM,
        lambda w: w.headers(
            1, [*request_fields(CHAT), *[(f"x-{i}", "y" * 8000) for i in range(40)]]
        ),
    ),
    connection_error(
        "10.5.1 80 KB of headers in 4 KB",
        ErrorCode.ENHANCE_YOUR_CALM,
        lambda w: w.headers(1, [*request_fields(CHAT), *[("x", "y" * 4000)] * 20]),
    ),
    fine("6.10 a header block in two frames", _split_headers),
    fine("6.10 an empty CONTINUATION", lambda w: _split_headers(w, frame(9, 1))),
    connection_error(
        "6.10 DATA within a header block", PROTOCOL, lambda w: _split_headers(w, data(1))
    ),
    connection_error(
        "6.10 PING within a header block", PROTOCOL, lambda w: _split_headers(w, ping())
    ),
    connection_error(
        "5.5 an unknown frame within a header block",
        PROTOCOL,
        lambda w: _split_headers(w, frame(0xEE, 1)),
    ),
    connection_error(
        "6.10 HEADERS of another stream within a header block",
        PROTOCOL,
        lambda w: _split_headers(w, w.headers(3, request_fields(CHAT))),
    ),
    connection_error(
        "6.10 CONTINUATION of another stream",
        PROTOCOL,
        lambda w: _split_headers(w, stream=3),
    ),
    connection_error(
        "6.10 CONTINUATION on the connection", PROTOCOL, lambda w: _split_headers(w, stream=0)
    ),
    connection_error(
        "6.10 CONTINUATION after END_HEADERS",
        PROTOCOL,
        lambda w: open_stream(w) + frame(Kind.CONTINUATION, 1, b"", END_HEADERS),
    ),
    connection_error(
        "6.10 CONTINUATION on an idle stream",
        PROTOCOL,
        lambda _: frame(Kind.CONTINUATION, 1, b"", END_HEADERS),
    ),
]

SETTINGS = [
    fine("6.5.2 an unknown setting", lambda _: settings({0xEE: 1})),
    fine("6.5.2 as many settings as are taken", lambda _: settings({7 + n: 1 for n in range(32)})),
    connection_error(
        "6.5.2 more than any client has",
        ErrorCode.ENHANCE_YOUR_CALM,
        lambda _: settings({7 + n: 1 for n in range(33)}),
    ),
    fine("6.5.2 the largest values", lambda _: settings({4: MAX_WINDOW, 5: (1 << 24) - 1})),
    fine("6.5 a setting given twice", lambda _: frame(4, 0, struct.pack(">HLHL", 3, 1, 3, 100))),
    # FRAME_SIZE_ERROR (6.5); h2 has another code.
    connection_error(
        "6.5 an acknowledgement with a payload",
        PROTOCOL,
        lambda _: frame(Kind.SETTINGS, 0, bytes(6), ACK),
    ),
    connection_error(
        "6.5.2 ENABLE_PUSH of 2", PROTOCOL, lambda _: settings({Setting.ENABLE_PUSH: 2})
    ),
    connection_error(
        "6.5.2 INITIAL_WINDOW_SIZE above the largest",
        FLOW_CONTROL,
        lambda _: settings({Setting.INITIAL_WINDOW_SIZE: 1 << 31}),
    ),
    connection_error(
        "6.5.2 MAX_FRAME_SIZE below the smallest",
        PROTOCOL,
        lambda _: settings({Setting.MAX_FRAME_SIZE: MAX_FRAME - 1}),
    ),
    connection_error(
        "6.5.2 MAX_FRAME_SIZE above the largest",
        PROTOCOL,
        lambda _: settings({Setting.MAX_FRAME_SIZE: 1 << 24}),
    ),
]

FRAME_CASES = [*PREFACES, *FRAMES, *PADDING, *HPACK, *CONTINUATIONS, *SETTINGS]
