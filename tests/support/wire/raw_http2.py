"""An HTTP/2 client for tests that sends whatever it is told to, normal or broken.

Frames are made by hand (`frame` and its relatives), header blocks by hpack. A `Wire` is one
connection: it keeps every frame that comes, acknowledges SETTINGS and answers PINGs, and does
nothing else by itself: no WINDOW_UPDATE, no check of what is sent. `Wire.rpc` is gRPC on top.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
Fields = Sequence[tuple[bytes | str, bytes | str]]
_MAX_FRAME = 1 << 14
_WAIT_S = 5.0


class Kind(enum.IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class ErrorCode(enum.IntEnum):
    """Error codes, RFC 9113 section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Setting(enum.IntEnum):
    """Settings, RFC 9113 section 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


# ---- frames to send ------------------------------------------------------------------------------


def frame(
    kind: int, stream: int = 0, payload: bytes = b"", flags: int = 0, *, length: int | None = None
) -> bytes:
    """Make any frame; ``length`` is written in place of the payload's, bit 31 of stream is sent."""
    size = len(payload) if length is None else length
    return struct.pack(">HBBBL", size >> 8, size & 0xFF, kind, flags, stream) + payload


def settings(values: Mapping[int, int] | None = None) -> bytes:
    """Make a SETTINGS frame."""
    packed = (struct.pack(">HL", key, value) for key, value in (values or {}).items())
    return frame(Kind.SETTINGS, 0, b"".join(packed))


def data(stream: int, payload: bytes = b"", *, end: bool = False) -> bytes:
    """Make a DATA frame."""
    return frame(Kind.DATA, stream, payload, END_STREAM if end else 0)


def reset(stream: int, code: int = ErrorCode.CANCEL) -> bytes:
    """Make a RST_STREAM frame."""
    return frame(Kind.RST_STREAM, stream, struct.pack(">L", code))


def window_update(stream: int, increment: int) -> bytes:
    """Make a WINDOW_UPDATE frame."""
    return frame(Kind.WINDOW_UPDATE, stream, struct.pack(">L", increment))


def ping(payload: bytes = b"12345678", *, ack: bool = False) -> bytes:
    """Make a PING frame."""
    return frame(Kind.PING, 0, payload, ACK if ack else 0)


def goaway(last_stream: int = 0, code: int = ErrorCode.NO_ERROR, text: bytes = b"") -> bytes:
    """Make a GOAWAY frame."""
    return frame(Kind.GOAWAY, 0, struct.pack(">LL", last_stream, code) + text)


def message(payload: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """Make a gRPC message with its prefix; ``length`` is written in place of its own."""
    size = len(payload) if length is None else length
    return struct.pack(">BL", compressed, size) + payload


# ---- frames received -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """A frame that the server sent."""

    kind: int
    flags: int
    stream: int
    payload: bytes
    fields: tuple[tuple[str, str], ...] = ()
    """Of HEADERS: the decoded header block, non-ASCII bytes as surrogates."""

    @property
    def error_code(self) -> ErrorCode:
        """The code of a RST_STREAM or GOAWAY."""
        at = 4 if self.kind == Kind.GOAWAY else 0
        return ErrorCode(struct.unpack_from(">L", self.payload, at)[0])

    @property
    def ends(self) -> bool:
        """Whether it ends its stream."""
        marked = self.kind in (Kind.DATA, Kind.HEADERS) and bool(self.flags & END_STREAM)
        return marked or self.kind == Kind.RST_STREAM

    def __str__(self) -> str:
        """Write it in a line."""
        name = Kind(self.kind).name if self.kind <= max(Kind) else f"type {self.kind}"
        coded = self.kind in (Kind.GOAWAY, Kind.RST_STREAM)
        more = self.error_code.name if coded else self.fields or self.payload[:40]
        return f"{name} stream={self.stream} flags={self.flags:#x} {more!r}"


class Wire(asyncio.Protocol):
    """One connection. Waiting ends with an AssertionError that lists what came."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self.decoder = hpack.Decoder()
        self.encoder = hpack.Encoder()
        self.frames: list[Frame] = []
        self.closed = False
        self.fault: Exception | None = None
        """Why what came isn't HTTP/2."""
        self.port = 0
        """Of the server, if whoever made this says so."""
        self.answers = True
        """Whether SETTINGS and PINGs are answered."""
        self.next_stream = 1

    # ---- sending ---------------------------------------------------------------------------------

    def send(self, *parts: bytes) -> None:
        """Write bytes; nothing happens when the connection is closed."""
        if not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    async def drained(self) -> None:
        """Wait until the kernel has taken most of what was sent."""
        await asyncio.sleep(0)
        await self._writable.wait()

    def block(self, fields: Fields) -> bytes:
        """Encode a header block with this connection's HPACK state."""
        pairs = [(_raw(name), _raw(value)) for name, value in fields]
        return self.encoder.encode(pairs, huffman=False)

    def headers(self, stream: int, fields: Fields, *, end: bool = False) -> bytes:
        """Make a HEADERS frame, and CONTINUATION frames if need be."""
        block = self.block(fields)
        parts = [block[at : at + _MAX_FRAME] for at in range(0, len(block), _MAX_FRAME)] or [b""]
        kinds = [Kind.HEADERS, *[Kind.CONTINUATION] * (len(parts) - 1)]
        flags = [END_STREAM if end else 0, *[0] * (len(parts) - 1)]
        flags[-1] |= END_HEADERS
        made = zip(kinds, parts, flags, strict=True)
        return b"".join(frame(kind, stream, part, own) for kind, part, own in made)

    def rpc(
        self,
        path: str = "",
        metadata: Fields = (),
        *,
        fields: Fields | None = None,
        end: bool = False,
    ) -> Rpc:
        """Open an RPC; ``fields`` replace all request headers."""
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        self.send(self.headers(stream, fields or (*request_fields(path), *metadata), end=end))
        return Rpc(self, stream)

    # ---- receiving -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin (asyncio)."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Keep the frames that have come whole (asyncio)."""
        self._buffer += data
        while len(self._buffer) >= 9:
            high, low, kind, flags, stream = struct.unpack_from(">HBBBL", self._buffer)
            end = 9 + (high << 8) + low
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[9:end])
            del self._buffer[:end]
            try:
                self._take(kind, flags, stream, payload)
            except (AssertionError, hpack.HPACKError) as error:
                self.fault = error
                self.abort()

    def pause_writing(self) -> None:
        """Note that the kernel takes no more (asyncio)."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Note that it does again (asyncio)."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """End (asyncio)."""
        self.closed = True
        self._changed.set()
        self._writable.set()

    @property
    def rest(self) -> bytes:
        """What came and was no frame: the server may speak something else."""
        return bytes(self._buffer)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        fields: tuple[tuple[str, str], ...] = ()
        if kind == Kind.HEADERS:
            assert flags & END_HEADERS
            assert not flags & (PADDED | PRIORITY)
            decoded = self.decoder.decode(payload, raw=True)
            fields = tuple((_text(name), _text(value)) for name, value in decoded)
        self.frames.append(Frame(kind, flags, stream, payload, fields))
        if self.answers and not flags & ACK:
            if kind == Kind.SETTINGS:
                self.send(frame(Kind.SETTINGS, flags=ACK))
            elif kind == Kind.PING:
                self.send(ping(payload, ack=True))
        self._changed.set()

    async def until(self, holds: Callable[[], bool], within_s: float = _WAIT_S) -> None:
        """Wait until a condition holds, which is looked at when frames have come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not holds() and not self.closed:
                    self._changed.clear()
                    await self._changed.wait()
        assert holds(), f"{'closed' if self.closed else f'not in {within_s} s'}: {self}"

    async def first(
        self, kind: int, stream: int = 0, *, start: int = 0, within_s: float = _WAIT_S
    ) -> Frame:
        """Wait for the first frame of a kind on a stream, among those from ``start`` on."""
        await self.until(lambda: bool(self.of(kind, stream, start=start)), within_s)
        return self.of(kind, stream, start=start)[0]

    def of(self, kind: int, stream: int = 0, *, start: int = 0) -> list[Frame]:
        """Return the frames of a kind on a stream that have come."""
        return [f for f in self.frames[start:] if f.kind == kind and f.stream == stream]

    async def until_closed(self, within_s: float = _WAIT_S) -> None:
        """Wait until the server closes the connection."""
        await self.until(lambda: self.closed, within_s)

    async def answered(self) -> None:
        """Wait until the server has seen all that was sent: it answers a PING."""
        start = len(self.frames)
        self.send(ping(b"are all?"))
        await self.until(
            lambda: any(f.payload == b"are all?" for f in self.of(Kind.PING, start=start))
        )

    def abort(self) -> None:
        """Close without a word; what wasn't sent is dropped."""
        self._transport.abort()

    def send_eof(self) -> None:
        """Close its side, behind all that was sent."""
        self._transport.write_eof()

    def pause(self) -> None:
        """Read no more: the kernel's buffers fill."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        self._transport.resume_reading()

    async def close(self) -> None:
        """Close, wait until it is."""
        self.abort()
        await self.until_closed()

    def __str__(self) -> str:
        """List what came."""
        return "\n".join([*(str(f) for f in self.frames), repr(self.rest)])


@dataclass
class Rpc:
    """One RPC on a `Wire`; it reads what has come on its stream."""

    wire: Wire
    stream: int
    _taken: int = field(default=0)

    def send(self, payload: bytes, *, end: bool = False, compressed: int = 0) -> None:
        """Send a message, in one DATA frame."""
        self.wire.send(data(self.stream, message(payload, compressed=compressed), end=end))

    def send_raw(self, payload: bytes, *, end: bool = False) -> None:
        """Send a DATA frame."""
        self.wire.send(data(self.stream, payload, end=end))

    def reset(self, code: int = ErrorCode.CANCEL) -> None:
        """Reset the stream."""
        self.wire.send(reset(self.stream, code))

    @property
    def received(self) -> bytes:
        """All bytes of its DATA frames (the server pads none)."""
        return b"".join(f.payload for f in self.wire.of(Kind.DATA, self.stream))

    @property
    def messages(self) -> list[bytes]:
        """The whole messages that have come."""
        return list(_split(self.received))

    async def next(self, within_s: float = _WAIT_S) -> bytes:
        """Wait for the next message."""
        self._taken += 1
        await self.wire.until(lambda: len(self.messages) >= self._taken, within_s)
        return self.messages[self._taken - 1]

    @property
    def over(self) -> bool:
        """Whether the server has ended the stream."""
        return any(f.ends for f in self.wire.frames if f.stream == self.stream)

    async def end(self, within_s: float = _WAIT_S) -> dict[str, str]:
        """Wait for the end; return the trailers, or ``{"reset": code}``."""
        await self.wire.until(lambda: self.over, within_s)
        last = next(f for f in self.wire.frames if f.stream == self.stream and f.ends)
        return {"reset": last.error_code.name} if last.kind == Kind.RST_STREAM else {**_once(last)}

    async def headers(self, within_s: float = _WAIT_S) -> dict[str, str]:
        """Wait for the response headers."""
        return _once(await self.wire.first(Kind.HEADERS, self.stream, within_s=within_s))

    async def code(self) -> int:
        """Wait for the end; return the status code."""
        return int((await self.end())["grpc-status"])


def request_fields(path: str, /, **changed: str | None) -> list[tuple[str, str]]:
    """Make the headers of a gRPC request; ``changed`` by name (`_` for `-`), None leaves one out.

    `method`, `scheme`, `path` and `authority` are the pseudo headers.
    """
    made: dict[str, str | None] = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    for name, value in changed.items():
        plain = name.replace("_", "-")
        made[f":{plain}" if f":{plain}" in made else plain] = value
    return [(name, value) for name, value in made.items() if value is not None]


@contextlib.asynccontextmanager
async def connected(
    target: int | str,
    *,
    tls: ssl.SSLContext | None = None,
    first: bytes | None = None,
    source: str = "127.0.0.1",
) -> AsyncIterator[Wire]:
    """Connect to a port of 127.0.0.1, or to a Unix socket; send ``first`` for preface and SETTINGS.

    ``source`` is the address that the server sees. ``tls`` should name "h2" as its ALPN protocol;
    certificates are checked against "localhost".
    """
    loop = asyncio.get_running_loop()
    name = "localhost" if tls else None
    if isinstance(target, str):
        _, wire = await loop.create_unix_connection(Wire, target, ssl=tls, server_hostname=name)
    else:
        _, wire = await loop.create_connection(
            Wire, "127.0.0.1", target, ssl=tls, server_hostname=name, local_addr=(source, 0)
        )
    try:
        wire.send(PREFACE + settings() if first is None else first)
        yield wire
    finally:
        await wire.close()


def _raw(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode("ascii", "surrogateescape")


def _split(received: bytes) -> Iterable[bytes]:
    while len(received) >= 5:
        size = int.from_bytes(received[1:5])
        if len(received) < 5 + size:
            return
        yield received[5 : 5 + size]
        received = received[5 + size :]


def _once(headers: Frame) -> dict[str, str]:
    return dict(headers.fields)
