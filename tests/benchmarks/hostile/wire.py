"""HTTP/2 as an attacker sends it: frames made by hand, and a connection that follows no rule.

Header blocks use no dynamic table unless an attack wants one, so they are made once and sent often.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import hpack

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CANCEL = 8
MAX_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = 65_535
MAX_FRAME = 16_384
_TABLE_SIZE, INITIAL_WINDOW = 1, 4
_HEAD = struct.Struct(">HBBBI")
_DECODED_MOST = 2_000
WIDE = 1 << 30
"""Room for a connection's answers, and for more updates of that."""


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes | memoryview = b"") -> bytes:
    length = len(payload)
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def settings(values: Mapping[int, int]) -> bytes:
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", *pair) for pair in values.items()))


def window_update(stream: int, more: int) -> bytes:
    return frame(WINDOW_UPDATE, stream=stream, payload=struct.pack(">I", more))


def reset(stream: int, code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, stream=stream, payload=struct.pack(">I", code))


def message(data: bytes, *, compressed: bool = False) -> bytes:
    """Frame a gRPC message."""
    return struct.pack(">BI", compressed, len(data)) + data


def number(value: int, bits: int, first: int = 0) -> bytes:
    """Encode an integer as HPACK does, with a prefix of ``bits`` bits."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    out, value = bytearray([first | most]), value - most
    while value > 0x7F:
        out.append(0x80 | value & 0x7F)
        value >>= 7
    out.append(value)
    return bytes(out)


def text(value: bytes) -> bytes:
    return number(len(value), 7) + value


def literal(name: bytes, value: bytes, *, indexed: bool = False) -> bytes:
    """Encode a header; ``indexed``: it goes into the dynamic table, as entry 62."""
    return (b"\x40" if indexed else b"\x00") + text(name) + text(value)


def headers(
    path: bytes | str, key: str | None = None, more: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """Make the header block of a gRPC call; it leaves the dynamic table alone."""
    path = path.encode() if isinstance(path, str) else path
    block = b"\x83\x86\x04" + text(path) + b"\x01" + text(b"processor")
    block += b"\x0f\x10" + text(b"application/grpc") + literal(b"te", b"trailers")
    if key:
        block += literal(b"authorization", b"Bearer " + key.encode())
    return block + b"".join(literal(name, value) for name, value in more)


def opening(stream: int, block: bytes, *, end: bool = False) -> bytes:
    """Make the frames that begin a stream."""
    flags = END_STREAM if end else 0
    pieces = [block[i : i + MAX_FRAME] for i in range(0, len(block), MAX_FRAME)] or [b""]
    kinds = [HEADERS, *[CONTINUATION] * (len(pieces) - 1)]
    frames = []
    for i, (kind, piece) in enumerate(zip(kinds, pieces, strict=True)):
        last = END_HEADERS if i == len(pieces) - 1 else 0
        frames.append(frame(kind, last | (flags if kind == HEADERS else 0), stream, piece))
    return b"".join(frames)


@dataclass
class Tally:
    """What all connections of an attacker did and saw."""

    sent_bytes: int = 0
    received_bytes: int = 0
    connections: int = 0
    calls: int = 0
    answers: Counter[str] = field(default_factory=Counter)


class Pace:
    """How many bytes an attacker may send a second; 0: as many as go."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        """Begin with nothing saved up."""
        self._rate = bytes_per_s
        self._free_at = 0.0

    async def spend(self, size: int) -> None:
        """Wait until ``size`` bytes may be sent; always lets other tasks run."""
        wait_s = 0.0
        if self._rate:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now - 0.05) + size / self._rate
            wait_s = max(0.0, self._free_at - now)
        await asyncio.sleep(wait_s)


class Connection(asyncio.Protocol):
    """A connection that sends what it is told, and counts what comes."""

    def __init__(self, tally: Tally, pace: Pace, *, window: int, alone: bool) -> None:
        """Announce ``window`` for each stream; ``alone``: nobody answers, so none is awaited."""
        self._tally, self._pace, self._own_window, self._alone = tally, pace, window, alone
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._writable = asyncio.Event()
        self._moved = asyncio.Event()
        self._initial = self._window = DEFAULT_WINDOW
        self._windows: dict[int, int] = {}
        self._ends: dict[int, asyncio.Future[str]] = {}
        self._status: dict[int, str] = {}
        self._last = -1
        self.data_bytes: Counter[int] = Counter()
        """Bytes of DATA received, by stream."""
        self.tops_up = True
        """Whether windows are opened again by what was received."""
        self.closed = False

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface; the dynamic table of answers is off, so that each decodes alone."""
        self._transport = made = cast("asyncio.Transport", transport)  # uvloop's own
        self._writable.set()
        self._tally.connections += 1
        values = {_TABLE_SIZE: 0, INITIAL_WINDOW: self._own_window}
        made.write(PREFACE + settings(values) + window_update(0, WIDE))

    def connection_lost(self, exc: Exception | None) -> None:
        """End whatever waits."""
        self.closed = True
        self._tally.answers["connection closed"] += 1
        self._writable.set()
        self._moved.set()
        for end in self._ends.values():
            if not end.done():
                end.set_result("connection closed")

    def pause_writing(self) -> None:
        """Make senders wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let senders go on."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Look at whole frames."""
        self._tally.received_bytes += len(data)
        rest, at = self._rest + data, 0
        while len(rest) - at >= _HEAD.size:
            high, low, kind, flags, stream = _HEAD.unpack_from(rest, at)
            end = at + _HEAD.size + (high << 8 | low)
            if len(rest) < end:
                break
            self._frame(kind, flags, stream, rest[at + _HEAD.size : end])
            at = end
        self._rest = rest[at:]

    # ---- what comes

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._data(stream, len(payload))
        elif kind == HEADERS:
            self._headers(stream, flags, payload)
        elif kind == SETTINGS and not flags & ACK:
            self._settings(payload)
        elif kind == PING and not flags & ACK:
            self._write(frame(PING, ACK, payload=payload))
        elif kind == WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream:
                self._windows[stream] = self._windows.get(stream, self._initial) + more
            else:
                self._window += more
            self._moved.set()
        elif kind == RST_STREAM:
            self._ended(stream, f"reset {int.from_bytes(payload, 'big')}")
        elif kind == GOAWAY:
            self._tally.answers[f"GOAWAY {int.from_bytes(payload[4:8], 'big')}"] += 1
        if flags & END_STREAM and kind in (DATA, HEADERS):
            self._ended(stream, self._status.pop(stream, "end"))

    def _data(self, stream: int, size: int) -> None:
        self.data_bytes[stream] += size
        if self.tops_up and size and not self.closed:
            more = window_update(0, size)
            self._write(more + window_update(stream, size) if self._own_window else more)

    def _headers(self, stream: int, flags: int, block: bytes) -> None:
        if flags & END_STREAM and sum(self._tally.answers.values()) < _DECODED_MOST:
            with contextlib.suppress(hpack.HPACKError):
                found = {bytes(k): bytes(v) for k, v in hpack.Decoder().decode(block, raw=True)}
                self._status[stream] = "status " + found.get(b"grpc-status", b"-").decode()

    def _settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW:
                self._windows = {k: v + value - self._initial for k, v in self._windows.items()}
                self._initial = value
        self._write(frame(SETTINGS, ACK))
        self._moved.set()

    def _ended(self, stream: int, how: str) -> None:
        self._tally.answers[how] += 1
        self._windows.pop(stream, None)
        end = self._ends.pop(stream, None)
        if end is not None and not end.done():
            end.set_result(how)
        self._moved.set()

    # ---- what goes

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(data)
            self._tally.sent_bytes += len(data)

    async def send(self, data: bytes) -> None:
        """Send bytes when pace and socket allow.

        Raises:
            ConnectionError: the connection is closed.
        """
        await self._pace.spend(len(data))
        await self._writable.wait()
        if self.closed:
            raise ConnectionResetError
        self._write(data)

    def next_stream(self, *, awaited: bool = False) -> int:
        """Take a stream's number; with ``awaited``, `end` may be called for it."""
        self._last += 2
        self._tally.calls += 1
        if awaited and not self._alone:
            self._ends[self._last] = asyncio.get_running_loop().create_future()
        return self._last

    async def upload(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """Send a body as flow control lets it; returns early when the stream has ended.

        Raises:
            ConnectionError: the connection is closed.
        """
        view, at = memoryview(data), 0
        while at < len(data):
            room = min(self._window, self._windows.get(stream, self._initial), MAX_FRAME)
            if room <= 0:
                self._moved.clear()
                await self._moved.wait()
                if self.closed:
                    raise ConnectionResetError
                if not self._alone and stream not in self._ends:
                    return
                continue
            piece = view[at : at + room]
            at += len(piece)
            self._window -= len(piece)
            self._windows[stream] = self._windows.get(stream, self._initial) - len(piece)
            await self.send(frame(DATA, END_STREAM * (end and at == len(data)), stream, piece))

    async def end(self, stream: int) -> str:
        """Wait for a stream's end and tell which; alone, there is none and it returns at once."""
        future = self._ends.get(stream)
        return await future if future is not None else "alone"

    def ended(self, stream: int) -> bool:
        return not self._alone and stream not in self._ends

    def stop_reading(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()

    def close(self) -> None:
        """Cut it, without a word."""
        if self._transport is not None:
            self._transport.abort()
