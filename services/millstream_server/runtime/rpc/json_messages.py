"""Messages as JSON, by Protobuf's own mapping, for callers that have no generated code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from google.protobuf import json_format

from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.threads import DaemonThreads

_AT_ONCE_BYTES = 4 << 10
"""More is converted in a thread: a message takes up to 4 µs for each of its numbers."""
_MOST_WHY = 300
_THREAD = DaemonThreads(1, "json")
"""One for all calls: each further one would take as much time from the event loop."""


def from_json(kind: Callable[[], Any] | None, data: bytes) -> Any:
    """Parse a message of a ``kind``; without one, what came is returned.

    Unknown fields are refused: a name that is misspelt would be ignored silently.

    Raises:
        InvalidRequestError: it isn't JSON, or not such a message.
    """
    if kind is None:
        return data
    try:
        text = data.decode()
        if not text.lstrip().startswith("{"):
            raise InvalidRequestError("the message isn't a JSON object")
        return json_format.Parse(text, kind())
    except UnicodeDecodeError:
        raise InvalidRequestError(
            "the message isn't JSON: it has bytes that aren't UTF-8"
        ) from None
    except json_format.ParseError as error:
        why = str(error).partition("\n")[0][:_MOST_WHY]
        raise InvalidRequestError(f"the message isn't as it should be: {why}") from None


def to_json(message: Any) -> bytes:
    """Make JSON of a message; of bytes, nothing else."""
    if isinstance(message, bytes):
        return message
    return json_format.MessageToJson(message, indent=None, ensure_ascii=False).encode()


async def parsed(kind: Callable[[], Any] | None, data: bytes) -> Any:
    """Do `from_json`, of much in a thread."""
    return await _converted(partial(from_json, kind, data), len(data))


async def made(message: Any) -> bytes:
    """Do `to_json`, of much in a thread."""
    size = 0 if isinstance(message, bytes) else message.ByteSize()
    data: bytes = await _converted(partial(to_json, message), size)
    return data


async def _converted(convert: Callable[[], Any], nbytes: int) -> Any:
    if nbytes <= _AT_ONCE_BYTES:
        return convert()
    return await asyncio.wrap_future(_THREAD.submit(convert))
