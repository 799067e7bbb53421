"""Messages as JSON, by Protobuf's own mapping, for callers that have no generated code.

The library takes 3 µs for a number and 8 µs for an empty message, in Python. So the parts of a
message are counted before it is parsed, and what takes long is done in the pool.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from google.protobuf import json_format

from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.rpc.message_parts import MAX_PARTS
from millstream_server.runtime.work.pool import WorkPool, WorkStoppedError, stop_if_gone

_AT_ONCE_S = 2e-3
"""What takes longer is done in the pool."""
_SECONDS_PER_BYTE = 60e-9
_SECONDS_PER_PART = 4e-6
_SECONDS_PER_BYTE_MADE = 1e-6
"""Of a response: the library takes that for small numbers."""
_COUNTED_BYTES = 1 << 20
"""Of a longer message the rest is taken to be alike."""
_STOPS_AFTER = 256
"""Parts of a list, in up to 5 ms."""
_MOST_WHY = 300


def from_json(kind: Callable[[], Any] | None, data: bytes) -> Any:
    """Parse a message of a ``kind``; without one, what came is returned.

    Unknown fields are refused: a name that is misspelt would be ignored silently.

    Raises:
        InvalidRequestError: it isn't JSON, or not such a message, or has too many parts.
    """
    if kind is None:
        return data
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(
            "the message isn't JSON: it has bytes that aren't UTF-8"
        ) from None
    if not text.lstrip().startswith("{"):
        raise InvalidRequestError("the message isn't a JSON object")
    try:
        return json_format.ParseDict(json.loads(text, object_pairs_hook=_Objects()), kind())
    except (InvalidRequestError, WorkStoppedError):
        raise
    except Exception as error:  # noqa: BLE001 - of any class: the library checks no types
        why = str(error).partition("\n")[0][:_MOST_WHY]
        raise InvalidRequestError(f"the message isn't as it should be: {why}") from None


class _Objects:
    """Makes the objects of a message; counts them and their fields before they become messages.

    Numbers and texts in lists don't count: they are bounded by the message's length.
    """

    def __init__(self) -> None:
        self._parts = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._parts += 1 + len(pairs)
        # The library takes an empty list for an empty message.
        self._parts += sum([v.count([]) for _, v in pairs if type(v) is list])
        if self._parts > MAX_PARTS:
            raise InvalidRequestError(f"the message has more than {MAX_PARTS} objects and fields")
        found = {name: _Long(v) if type(v) is list else v for name, v in pairs}
        if len(found) != len(pairs):
            raise InvalidRequestError("the message has an object with two fields of one name")
        return found


class _Long(list[Any]):
    """A list whose parsing stops when the caller has left."""

    def __iter__(self) -> Iterator[Any]:
        for number, part in enumerate(super().__iter__()):
            if not number % _STOPS_AFTER:
                stop_if_gone()
            yield part


def to_json(message: Any) -> bytes:
    """Make JSON of a message; of bytes, nothing else."""
    if isinstance(message, bytes):
        return message
    return json_format.MessageToJson(message, indent=None, ensure_ascii=False).encode()


async def parsed(kind: Callable[[], Any] | None, data: bytes, pool: WorkPool) -> Any:
    """Do `from_json`, of much in the pool."""
    head = data[:_COUNTED_BYTES]
    parts = (head.count(b",") + head.count(b"{")) * len(data) / max(1, len(head))
    seconds = len(data) * _SECONDS_PER_BYTE + parts * _SECONDS_PER_PART
    return await _converted(partial(from_json, kind, data), seconds if kind else 0.0, pool)


async def made(message: Any, pool: WorkPool) -> bytes:
    """Do `to_json`, of much in the pool."""
    size = 0 if isinstance(message, bytes) else message.ByteSize()
    seconds = size * _SECONDS_PER_BYTE_MADE
    data: bytes = await _converted(partial(to_json, message), seconds, pool)
    return data


async def _converted(convert: Callable[[], Any], seconds: float, pool: WorkPool) -> Any:
    return convert() if seconds <= _AT_ONCE_S else await pool.run(convert, seconds)
