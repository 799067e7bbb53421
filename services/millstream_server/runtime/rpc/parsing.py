"""Requests that don't parse: their error names the field.

The usual cause is a `string` that isn't UTF-8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from millstream_server.runtime.errors import Code, MalformedMessageError, StatusError

_LENGTH_DELIMITED = 2
_MAX_DEPTH = 16
_MAX_EXPLAINED_BYTES = 64 << 10
"""Longer messages aren't searched for the bad field, which would block the event loop."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Takes the place of a request that didn't parse."""

    error: StatusError


def tolerant(
    deserialize: Callable[[bytes], Any] | None, max_bytes: int | None = None
) -> Callable[[bytes], Any]:
    """Wrap a generated deserializer: it returns `Malformed` for a message that it can't take.

    That is one that doesn't parse, or has more than ``max_bytes``. Without a deserializer requests
    stay bytes, as in gRPC.
    """
    if deserialize is None:
        return bytes
    descriptor = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def parse(data: bytes) -> Any:
        if max_bytes is not None and len(data) > max_bytes:
            return Malformed(_too_large(len(data), max_bytes))
        try:
            return deserialize(data)
        except DecodeError:
            return Malformed(_explain(descriptor, data))

    return parse


def _too_large(nbytes: int, most: int) -> StatusError:
    """Make the failure that gRPC's own limits have."""
    return StatusError(
        Code.RESOURCE_EXHAUSTED,
        f"the message has {nbytes} bytes; this method takes {most} at most",
    )


def _explain(descriptor: Descriptor | None, data: bytes) -> MalformedMessageError:
    short = len(data) <= _MAX_EXPLAINED_BYTES
    path = _find_bad_text(descriptor, data, "", 0) if descriptor and short else None
    if path:
        return MalformedMessageError(f"{path}: is not valid UTF-8")
    name = descriptor.full_name if descriptor else "the method's request message"
    return MalformedMessageError(f"the message is not a valid {name}; check the client's stubs")


def _find_bad_text(descriptor: Descriptor, data: bytes, prefix: str, depth: int) -> str | None:
    """Walk the wire format with its descriptor; return the path of the first bad string."""
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        return None
    seen: Counter[int] = Counter()
    for raw in cast("Iterable[Any]", fields):
        field = descriptor.fields_by_number.get(raw.field_number)
        index = seen[raw.field_number]
        seen[raw.field_number] += 1
        if field is None or raw.wire_type != _LENGTH_DELIMITED or not isinstance(raw.data, bytes):
            continue
        path = prefix + field.name + (f"[{index}]" if field.is_repeated else "")
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(raw.data):
            return path
        if field.message_type is not None and depth < _MAX_DEPTH:
            found = _find_bad_text(field.message_type, raw.data, path + ".", depth + 1)
            if found:
                return found
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
