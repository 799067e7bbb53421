"""Random HTTP/2 connections: normal RPCs cut into frames, then damaged, or not.

All chance comes from one `random.Random`, so that a seed repeats a connection byte for byte.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import hpack

from tests.support.wire.raw_http2 import (
    END_HEADERS,
    END_STREAM,
    PADDED,
    PREFACE,
    Kind,
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

_MAX_FRAME = 1 << 14
_NUMBERS = (0, 1, 2, 3, 255, 1 << 14, (1 << 16) - 1, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_TIMEOUTS = ("1S", "50m", "1n", "0S", "99999999H", "", "1", "-1S", "123456789S", "1.5S", "\u0663S")
_FIELDS: tuple[tuple[bytes, bytes], ...] = (
    *((b"x-a", b"b"), (b"x-a", b"\xff\xfe"), (b"x-a", b""), (b"x-a", b"a" * 6000), (b"X-A", b"b")),
    *((b"x-b-bin", b"AAEC"), (b"x-b-bin", b"AAE,AQ=="), (b"x-b-bin", b"?"), (b"x-b-bin", b"\xff")),
    *(
        (b"", b""),
        (b"a b", b"c"),
        (b"x", b" y "),
        (b"x", b"y\r\nz: 1"),
        (b"x", b"\0"),
        (b"-bin", b""),
    ),
    *((b"te", b"gzip"), (b"connection", b"close"), (b"content-length", b"7"), (b"host", b"other")),
    *((b":path", b"/"), (b":method", b"GET"), (b":status", b"200"), (b":authority", b"\xff")),
    *((b"grpc-encoding", b"gzip"), (b"grpc-encoding", b"br"), (b"grpc-encoding", b"\xff")),
    *((b"grpc-status", b"13"), (b"grpc-message", b"%ff%"), (b"grpc-timeout", b"1S")),
    *((b"content-type", b"text/html"), (b"authorization", b"Bearer \xc3\xa9"), (b"cookie", b"a=b")),
    *((b"traceparent", b"00-zz"), (b"baggage", b"k=\xff,"), (b"accept-encoding", b"\x80")),
)
_WEB = (
    *(b"application/grpc-web+proto", b"application/grpc-web", b"application/grpc-web+json"),
    *(b"application/grpc-web-text", b"application/connect+proto", b"application/connect+json"),
    *(b"application/proto", b"application/json"),
)
"""Content types of gRPC-web and Connect."""
_PATHS = (b"/", b"", b"*", b"/a", b"/\xff", b"/a/b/c", b"/" + b"x" * 5000, b"/healthz")


@dataclass(frozen=True)
class WireScript:
    """Everything that is needed to make a connection again."""

    writes: tuple[bytes, ...]
    """What is sent, write by write."""
    reads: bool = True
    """Whether what comes is read."""
    abort: bool = False
    """Whether the connection is cut at once, or left to the server for a while."""

    def to_json(self) -> str:
        """Write it in a line."""
        return json.dumps({**vars(self), "writes": [one.hex() for one in self.writes]})

    @classmethod
    def from_json(cls, line: str) -> WireScript:
        """Read one that was printed."""
        fields = json.loads(line)
        return cls(**{**fields, "writes": tuple(map(bytes.fromhex, fields["writes"]))})


def make_wire_script(chance: random.Random, normal: Mapping[str, Sequence[bytes]]) -> WireScript:
    """Invent a connection; ``normal`` has messages by the methods' paths."""
    frames = _Maker(chance, normal).frames()
    for _ in range(chance.choice((0, 0, 1, 1, 1, 2, 5, 20))):
        _damage(chance, frames)
    first = PREFACE + settings(_settings(chance))
    if chance.random() < 0.03:
        first = _flipped(chance, first)
    return WireScript(
        tuple(_writes(chance, [first, *frames])),
        reads=chance.random() < 0.9,
        abort=chance.random() < 0.3,
    )


def _writes(chance: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """Put frames together, or cut them apart."""
    match chance.randrange(4):
        case 0:
            return list(frames)
        case 1:
            return [b"".join(frames)]
        case 2:
            sent = b"".join(frames)
            cuts = sorted(chance.randrange(len(sent)) for _ in range(chance.choice((1, 3, 30))))
            return [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
        case _:
            at = chance.randrange(len(frames) + 1)
            return [b"".join(frames[:at]), b"".join(frames[at:])]


def _settings(chance: random.Random) -> dict[int, int]:
    if chance.random() < 0.6:
        return {}
    return {
        chance.choice((1, 3, 4, 5, 6, 9)): chance.choice((0, 1, 100, _MAX_FRAME, 65_535, 1 << 20))
        for _ in range(chance.randrange(4))
    }


# ---- normal connections --------------------------------------------------------------------------


class _Maker:
    """Makes the frames of some RPCs that run beside each other."""

    def __init__(self, chance: random.Random, normal: Mapping[str, Sequence[bytes]]) -> None:
        self._chance = chance
        self._sound = normal
        self._encoder = hpack.Encoder()
        self._next = 1

    def frames(self) -> list[bytes]:
        """Make them, in an order that HTTP/2 allows."""
        chance = self._chance
        streams = [self._rpc() for _ in range(chance.choice((1, 1, 2, 4, 12)))]
        made: list[bytes] = []
        while streams:
            stream = chance.choice(streams)
            made += stream.pop(0)()
            if not stream:
                streams.remove(stream)
            if chance.random() < 0.2:
                made.append(_control(chance, self._next))
        return made

    def _rpc(self) -> list[Callable[[], list[bytes]]]:
        """Plan an RPC: steps that make frames when their turn comes, for HPACK counts the order."""
        chance = self._chance
        path = chance.choice(list(self._sound))
        web = chance.choice(_WEB) if chance.random() < 0.3 else b""
        fields = self._fields(path, web)
        stream = [0]

        def open_it() -> list[bytes]:
            stream[0], self._next = self._next, self._next + 2
            return self._headers(stream[0], fields)

        sound = self._sound[path]
        body = b"".join(self._message(b"{}" if b"json" in web else one) for one in sound)
        if web in (b"application/proto", b"application/json"):
            body = b"{}" if b"json" in web else sound[0]
        elif b"text" in web:
            body = base64.b64encode(body)
        parts = self._parts(body)
        steps: list[Callable[[], list[bytes]]] = [open_it]
        steps += [lambda part=part: [self._data(stream[0], part)] for part in parts]  # type: ignore[misc]
        match chance.randrange(6):
            case 0:
                steps.append(lambda: [reset(stream[0], chance.choice((0, 5, 8, 99)))])
            case 1:
                steps.append(lambda: self._headers(stream[0], [(b"x-t", b"1")], END_STREAM))
            case 2:
                pass  # it stays open
            case _:
                steps.append(lambda: [data(stream[0], end=True)])
        if chance.random() < 0.3:
            steps.insert(1, lambda: [window_update(stream[0], chance.choice((1, 9, 1 << 20)))])
        return steps

    def _fields(self, path: str, web: bytes) -> list[tuple[bytes, bytes]]:
        chance = self._chance
        fields = [(k.encode(), v.encode()) for k, v in request_fields(path)]
        if web:
            fields = [(k, web if k == b"content-type" else v) for k, v in fields]
            if chance.random() < 0.3:
                fields.append((b"connect-timeout-ms", chance.choice((b"1", b"60000", b"x"))))
        if chance.random() < 0.3:
            fields.append((b"grpc-timeout", chance.choice(_TIMEOUTS).encode()))
        if chance.random() < 0.3:
            at = chance.randint(0 if chance.random() < 0.2 else len(fields), len(fields))
            fields[at:at] = chance.choices(_FIELDS, k=chance.choice((1, 1, 2, 60)))
        if chance.random() < 0.05:
            fields = [(k, chance.choice(_PATHS) if k == b":path" else v) for k, v in fields]
        if chance.random() < 0.05:
            del fields[chance.randrange(len(fields))]
        return fields

    def _message(self, payload: bytes) -> bytes:
        chance = self._chance
        if chance.random() < 0.05:
            return message(
                gzip.compress(payload * chance.choice((1, 1, 5000)), mtime=0), compressed=1
            )
        if chance.random() < 0.05:
            return message(payload, length=chance.choice(_NUMBERS) & 0xFFFFFFFF)
        return message(payload)

    def _parts(self, body: bytes) -> list[bytes]:
        size = self._chance.choice((1, 7, 100, _MAX_FRAME, _MAX_FRAME, _MAX_FRAME))
        size = max(size, len(body) // 40 + 1)
        return [body[i : i + size] for i in range(0, min(len(body), 60_000), size)]

    def _headers(
        self, stream: int, fields: Sequence[tuple[bytes, bytes]], flags: int = 0
    ) -> list[bytes]:
        chance = self._chance
        block = self._encoder.encode(list(fields), huffman=chance.random() < 0.5)
        size = chance.choice((_MAX_FRAME, _MAX_FRAME, _MAX_FRAME, len(block) // 3 + 1))
        parts = [block[i : i + size] for i in range(0, len(block), size)] or [b""]
        made = []
        for i, part in enumerate(parts):
            ends = END_HEADERS if i == len(parts) - 1 else 0
            kind, own = (Kind.CONTINUATION, 0) if i else (Kind.HEADERS, flags)
            made.append(frame(kind, stream, part, ends | own))
        return made

    def _data(self, stream: int, part: bytes) -> bytes:
        pad = self._chance.choice((0, 0, 0, 0, 1, 200))
        if not pad or len(part) + pad + 1 > _MAX_FRAME:
            return data(stream, part)
        return frame(Kind.DATA, stream, bytes([pad]) + part + bytes(pad), PADDED)


def _control(chance: random.Random, next_stream: int) -> bytes:
    """Make a frame that is allowed at any time, or nearly."""
    stream = chance.randrange(1, next_stream + 2, 2)
    return chance.choice(
        (
            lambda: ping(chance.randbytes(8), ack=chance.random() < 0.2),
            lambda: settings(_settings(chance)),
            lambda: window_update(0, chance.choice((1, 9, 1 << 20))),
            lambda: frame(Kind.PRIORITY, stream, struct.pack(">LB", 0, 15)),
            lambda: frame(chance.randrange(10, 256), stream, chance.randbytes(5)),
            lambda: goaway(0, chance.choice((0, 0, 2, 11)), b"bye"),
        )
    )()


# ---- damage --------------------------------------------------------------------------------------


def _damage(chance: random.Random, frames: list[bytes]) -> None:
    """Change a frame, or the order of frames."""
    at = chance.randrange(len(frames))
    match chance.randrange(12):
        case 0 | 1 | 2:
            frames[at] = _flipped(chance, frames[at])
        case 3:
            del frames[at : at + 1 if len(frames) > 1 else at]
        case 4:
            frames.insert(chance.randrange(len(frames) + 1), frames[at])
        case 5:
            other = chance.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
        case 6:
            frames[at] = frames[at][: chance.randrange(len(frames[at]) + 1)]
        case 7:
            frames[at] += chance.randbytes(chance.choice((1, 9, 100)))
        case 8:
            frames[at:at] = [_any_frame(chance) for _ in range(chance.choice((1, 1, 5)))]
        case 9:
            frames[at:at] = [frames[at]] * chance.choice((3, 50, 300))
        case 10:
            frames[at] = _with_other_head(chance, frames[at])
        case _:
            frames[at:] = [chance.randbytes(chance.choice((9, 500)))]


def _flipped(chance: random.Random, sent: bytes) -> bytes:
    """Flip some bits."""
    changed = bytearray(sent)
    for _ in range(chance.choice((1, 1, 3)) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _any_frame(chance: random.Random) -> bytes:
    """Make a frame of any type, anywhere, with anything in it."""
    number = struct.pack(">L", chance.choice(_NUMBERS) & 0xFFFFFFFF)
    payload = chance.choice((b"", number, number * 2, chance.randbytes(chance.choice((5, 6, 60)))))
    flags = chance.choice((0, 1, 4, 5, 8, 0x20, 0xFF))
    return frame(chance.randrange(11), chance.choice((0, 0, 1, 1, 2, 3, 99)), payload, flags)


def _with_other_head(chance: random.Random, sent: bytes) -> bytes:
    """Change type, flags, stream or length of a frame."""
    if len(sent) < 9:
        return sent
    head = bytearray(sent[:9])
    match chance.randrange(4):
        case 0:
            head[3] = chance.randrange(12)
        case 1:
            head[4] = chance.randrange(256)
        case 2:
            head[5:9] = struct.pack(
                ">L", chance.choice((0, 1, 2, 3, 5, 101, 1 << 31, (1 << 31) - 1))
            )
        case _:
            head[:3] = struct.pack(">L", chance.choice(_NUMBERS) & 0xFFFFFF)[1:]
    return bytes(head) + sent[9:]
