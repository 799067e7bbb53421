"""How many parts a message has, counted before it is parsed.

The library parses 18 million empty messages in a second and takes 100 bytes for each: 2 bytes on
the wire hold the event loop for 0.1 s in 4 MiB of them, and 200 MB of memory. It can't be stopped,
and keeps the interpreter's lock.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from google.protobuf.descriptor import Descriptor

from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.work.pool import WorkPool, stop_if_gone

MAX_PARTS = 90_000
"""Texts and messages in a message: some more than the 16,384 calls have that a conversation may.
They are parsed in 5 ms."""
UNCOUNTED_BYTES = 16 << 10
"""Shorter messages are parsed in half a millisecond, whatever is in them."""
_AT_ONCE = 2048
"""Fields that are counted on the event loop, in a millisecond."""
_STOPS_AFTER = 4096
_SECONDS_PER_BYTE = 0.1e-6
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_LAST_OF_ONE_BYTE, _LONGEST_VARINT = 0x7F, 10


async def check_parts(data: bytes, descriptor: Descriptor, pool: WorkPool) -> None:
    """Refuse a message of too many parts; of many fields they are counted in the pool.

    Raises:
        InvalidRequestError: it has too many.
    """
    if _count(data, descriptor, _AT_ONCE) is None:
        parts = await pool.run(
            lambda: _count(data, descriptor, len(data)), len(data) * _SECONDS_PER_BYTE
        )
        if parts is None or parts > MAX_PARTS:
            raise InvalidRequestError(f"the message has more than {MAX_PARTS} texts and messages")


def _count(data: bytes, descriptor: Descriptor, most_fields: int) -> int | None:
    """Count the parts; None: there are more fields or too many parts.

    What isn't Protobuf ends it; the library says what is wrong.
    """
    fields = parts = 0
    left = [(0, len(data), descriptor)]
    try:
        while left:
            at, end, kind = left.pop()
            nested = _nested(kind)
            while at < end:
                fields += 1
                if fields > most_fields or parts > MAX_PARTS:
                    return None
                if not fields % _STOPS_AFTER:
                    stop_if_gone()
                tag, at = _varint(data, at)
                wire = tag & 7
                if wire == _LENGTH_DELIMITED:
                    parts += 1
                    size, at = _varint(data, at)
                    if (inner := nested.get(tag >> 3)) is not None:
                        left.append((at, at + size, inner))
                    at += size
                elif wire == _VARINT:
                    _, at = _varint(data, at)
                elif wire in _FIXED_BYTES:
                    at += _FIXED_BYTES[wire]
                else:  # the begin or end of a group, whose fields follow
                    parts += 1
    except IndexError:  # cut short, or no number
        pass
    return parts


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value <= _LAST_OF_ONE_BYTE:
        return value, at + 1
    value &= _LAST_OF_ONE_BYTE
    for place in range(1, _LONGEST_VARINT):
        byte = data[at + place]
        value |= (byte & _LAST_OF_ONE_BYTE) << 7 * place
        if byte <= _LAST_OF_ONE_BYTE:
            return value, at + place + 1
    raise IndexError


@functools.cache  # of the contract's few
def _nested(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    return {f.number: f.message_type for f in descriptor.fields if f.message_type is not None}
