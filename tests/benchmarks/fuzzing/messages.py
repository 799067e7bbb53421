"""Random messages on the wire, made from a descriptor: well-formed, near to it, or far from it.

They are written as bytes rather than built as objects, since that reaches what no stub can send:
strings that aren't UTF-8, fields twice or in odd order, numbers beyond an enum or a type, unknown
fields, groups. All chance comes from one `random.Random`, so that a seed repeats a message, and
Hypothesis, which has a Random of its own, can steer and shrink it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_MAX_DEPTH = 6
_MAX_BYTES = 200_000
_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)

_INTEGERS = (
    *(0, 1, 2, 3, 127, 128, 255, 439, 440, 511, 512, 65535, 65536, 1 << 20, (1 << 20) - 1),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 62), 253402300800),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 1_000_000_000, (1 << 64) - (1 << 31)),
)
_FLOATS = (
    *(0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 100.0, -100.0, 1e-45, 3.4e38, 1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf")),
)
_TEXTS = (
    *(b"", b" ", b"\0", b"hi", b"@", b"a" * 129, b"a" * 5000, "\u202e\u0301👩‍👩‍👧\ufeff".encode()),
    *(b"{{ 7 * 7 }}", b"{% raise %}", b"<|im_start|>system", b"<|im_end|>", b"..", b"a/../../etc"),
    *(b"{", b"[]", b'{"type": "object"}', b"[" * 400, b'{"a":' * 400, b"(a+)+$", b"null", b"1e999"),
    *(b"%s%n%x", b"\r\nx: y", b"millstream.v1.ProcessorService", b"google/protobuf/any.proto"),
)
_NOT_TEXTS = (
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"ok\xfe\xff",
    b"\xf5\x80\x80\x80",
    b"\xe2\x82",
)
_PLAUSIBLE: dict[str, tuple[object, ...]] = {
    "messages": (),
    "content": (),
    "model": (b"tiny", b"pair", b""),
    "role": (3, 3, 3, 3, 1, 4, 5),
    "slot": (0, 1, 2),
    "token_ids": (3, 5, 34, 439),
    "ids": (3, 5, 34, 439),
    "stop_token_ids": (40, 41),
    "max_new_tokens": (1, 2, 5, 30),
    "min_new_tokens": (0, 1),
    "n": (1, 2, 3),
    "text": (b"hi", b"hello there"),
    "service": (b"", b"millstream.v1.ProcessorService", b"liveness"),
    "file_containing_symbol": (b"millstream.v1.ChatRequest", b"grpc.health.v1.Health"),
    "file_by_filename": (b"millstream/v1/chat.proto",),
    "containing_type": (b"millstream.v1.ChatRequest",),
    "parameters_json_schema": (b"", b'{"type": "object"}'),
    "arguments_json": (b"{}",),
    "name": (b"", b"weather"),
    "logger": (b"", b"millstream_server", b"millstream_server.worker"),
}
"""Values that pass, by a field's name, so that messages get beyond the first check."""

_RARE = frozenset(
    {"ticket", "constraint", "tools", "tool_calls", "tool_call_id", "prompt", "min_new_tokens"}
)
"""Fields that most often get a request refused."""


class MessageMaker:
    """Makes messages; ``wildness`` from 0 (what a client may send) to 1 (anything)."""

    def __init__(self, chance: random.Random, wildness: float) -> None:
        self._chance = chance
        self._wildness = wildness
        self._left = _MAX_BYTES

    def opening(self, descriptor: Descriptor) -> bytes:
        """Make a stream's first message: what a oneof names first is what opens a stream."""
        return self.make(descriptor, first=0.9)

    def make(self, descriptor: Descriptor, depth: int = 0, first: float = 0.3) -> bytes:
        """Make one message's bytes; ``first``: how often a oneof's first member is taken."""
        chance = self._chance
        parts = [self._field(field, depth) for field in self._fields(descriptor, depth, first)]
        if self._wild():
            parts.append(self._unknown())
        if parts and self._wild():
            parts.append(chance.choice(parts))
        if self._wild():
            chance.shuffle(parts)
        data = b"".join(parts)
        self._left -= len(data)
        return data

    def _wild(self) -> bool:
        return self._chance.random() < self._wildness

    def _fields(self, descriptor: Descriptor, depth: int, first: float) -> list[FieldDescriptor]:
        """Choose which fields are there; of a oneof usually one."""
        chance = self._chance
        chosen = []
        for field in descriptor.fields:
            if field.message_type is not None and depth >= _MAX_DEPTH:
                continue
            likely = 0.5 if field.containing_oneof is None else 0.3
            if field.name in _PLAUSIBLE:
                likely = 0.9
            if field.name in _RARE:
                likely = 0.03
            if _is_choice(field):
                likely = 0.0
            if chance.random() < likely or self._wild():
                chosen.append(field)
        for oneof in descriptor.oneofs:
            fields = list(oneof.fields)
            if _is_choice(fields[0]) and not self._wild():
                chosen.append(fields[0] if chance.random() < first else chance.choice(fields))
        return chosen

    def _field(self, field: FieldDescriptor, depth: int) -> bytes:
        count = 1
        if field.is_repeated:
            count = self._chance.choice((1, 1, 2, 3))
            if self._wild() and self._left > 0:
                count = self._chance.choice((0, 0, 50, 300, 3000))
        wire_type, _ = _SCALARS.get(field.type, (_LENGTH, None))
        packed = field.is_repeated and wire_type != _LENGTH and not self._wild()
        if packed:
            value = b"".join(self._value(field, depth) for _ in range(count))
            return _tag(field.number, _LENGTH) + _varint(len(value)) + value
        parts = []
        for _ in range(count):
            if self._left < 0:
                break
            value = self._value(field, depth)
            length = _varint(len(value)) if wire_type == _LENGTH else b""
            parts.append(_tag(field.number, wire_type) + length + value)
        return b"".join(parts)

    def _value(self, field: FieldDescriptor, depth: int) -> bytes:
        if field.message_type is not None:
            return self.make(field.message_type, depth + 1)
        plausible = _PLAUSIBLE.get(field.name, ())
        wild = self._wild()
        kind = field.type
        if kind in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            return self._text(kind, plausible, wild=wild)
        if kind in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            number = self._chance.choice(_FLOATS) if wild else self._chance.choice((0.5, 1.0, 0.0))
        elif wild:
            number = self._chance.choice(_INTEGERS)
        elif plausible and isinstance(plausible[0], int):
            number = self._chance.choice(plausible)  # type: ignore[assignment]
        else:
            number = self._chance.randrange(3)
        _, encode = _SCALARS[kind]
        return encode(number)

    def _text(self, kind: int, plausible: tuple[object, ...], *, wild: bool) -> bytes:
        if not wild:
            values = plausible if plausible and isinstance(plausible[0], bytes) else _TEXTS[:5]
            return self._chance.choice(values)  # type: ignore[return-value]
        if kind == FieldDescriptor.TYPE_BYTES or self._chance.random() < 0.2:
            return self._chance.choice((*_NOT_TEXTS, bytes(self._chance.randrange(40))))
        return self._chance.choice(_TEXTS)

    def _unknown(self) -> bytes:
        number = self._chance.choice((99, 1000, 19000, (1 << 29) - 1))
        return self._chance.choice(
            (
                _tag(number, _VARINT) + _varint((1 << 64) - 1),
                _tag(number, _LENGTH) + b"\x03abc",
                _tag(number, _FIXED32) + b"\0\0\0\0",
                _tag(number, _START_GROUP) * 60 + _tag(number, _END_GROUP) * 60,
                _tag(number, _START_GROUP) * 200 + _tag(number, _END_GROUP) * 200,
                _tag(number, _START_GROUP),  # never ended: no protobuf
            )
        )


def mutate(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Damage serialized messages as a broken or hostile client would, one to four times."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        to = min(len(data), at + chance.choice((1, 2, 4, 16, 64)))
        match chance.randrange(8):
            case 0:  # flip a bit
                if at < len(data):
                    data = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + bytes(chance.randrange(256) for _ in range(4)) + data[at:]
            case 3:
                data = data[:at] + data[to:]
            case 4:
                data = data[:to] + data[at:to] * chance.choice((1, 3, 50)) + data[to:]
            case 5:  # a length, or whatever else stands there, that lies
                lie = _varint(
                    chance.choice((0, 1, 5, 127, 128, 65536, (1 << 31) - 1, (1 << 64) - 1))
                )
                data = data[:at] + lie + data[to:]
            case 6:
                other = chance.choice(others) if others else b""
                data = data[:at] + other[chance.randrange(len(other) + 1) :]
            case _:
                data += chance.choice(others) if others else data
        data = data[:_MAX_BYTES]
    return data


def _is_choice(field: FieldDescriptor) -> bool:
    """Tell a member of a real oneof from an `optional` field, which has one of its own."""
    oneof = field.containing_oneof
    return oneof is not None and not oneof.name.startswith("_")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf"))


def _zigzag(value: int) -> bytes:
    return _varint((value << 1) & ((1 << 64) - 1))


_F = FieldDescriptor
_SCALARS: dict[int, tuple[int, Callable[..., bytes]]] = {
    _F.TYPE_DOUBLE: (_FIXED64, lambda value: struct.pack("<d", value)),
    _F.TYPE_FLOAT: (_FIXED32, _float32),
    _F.TYPE_FIXED32: (_FIXED32, lambda value: struct.pack("<I", value & 0xFFFFFFFF)),
    _F.TYPE_SFIXED32: (_FIXED32, lambda value: struct.pack("<I", value & 0xFFFFFFFF)),
    _F.TYPE_FIXED64: (_FIXED64, lambda value: struct.pack("<Q", value)),
    _F.TYPE_SFIXED64: (_FIXED64, lambda value: struct.pack("<Q", value)),
    _F.TYPE_SINT32: (_VARINT, _zigzag),
    _F.TYPE_SINT64: (_VARINT, _zigzag),
    _F.TYPE_INT32: (_VARINT, _varint),
    _F.TYPE_INT64: (_VARINT, _varint),
    _F.TYPE_UINT32: (_VARINT, _varint),
    _F.TYPE_UINT64: (_VARINT, _varint),
    _F.TYPE_BOOL: (_VARINT, _varint),
    _F.TYPE_ENUM: (_VARINT, _varint),
}
