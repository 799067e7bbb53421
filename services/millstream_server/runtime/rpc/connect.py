"""Failures as the Connect protocol says them: JSON with a code, a sentence and details.

See https://connectrpc.com/docs/protocol.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from google.protobuf import json_format

from millstream_server.runtime.errors import Code, Failure, MalformedMessageError, StatusError
from millstream_server.runtime.rpc.http import STATUSES
from millstream_server.runtime.rpc.status import to_status

_UNIMPLEMENTED = 501
"""Connect has this status for it, not the 404 that google.rpc.Code has."""
_REFUSED = {403: Code.PERMISSION_DENIED, 415: Code.UNIMPLEMENTED}
Metadata = Sequence[tuple[str, str | bytes]]


class HttpRefusalError(StatusError):
    """A request that HTTP itself has a status for: in every protocol the response has it."""

    def __init__(self, status: int, message: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(_REFUSED[status], message)
        self.status = status
        self.headers = headers


def status_of(failure: Failure) -> int:
    """Return HTTP's status of a failure, as Connect's table has it."""
    if isinstance(failure, HttpRefusalError):
        return failure.status
    code = _code(failure)
    return _UNIMPLEMENTED if code is Code.UNIMPLEMENTED else STATUSES.get(code, 500)


def error_json(failure: Failure) -> bytes:
    """Return the body of a unary call that failed."""
    return msgspec.json.encode(_error(failure))


def end_json(failure: Failure | None, trailers: Metadata) -> bytes:
    """Return the last message of a stream."""
    said: dict[str, Any] = {}
    if failure is not None:
        said["error"] = _error(failure)
    if trailers:
        metadata: dict[str, list[str]] = {}
        for key, value in trailers:
            metadata.setdefault(key, []).append(text_of(value))
        said["metadata"] = metadata
    return msgspec.json.encode(said)


def text_of(value: str | bytes) -> str:
    """Return a value of metadata as it is sent: bytes in base64 without padding."""
    return value if isinstance(value, str) else base64.b64encode(value).decode().rstrip("=")


def _code(failure: Failure) -> Code:
    """Return a failure's code: what can't be read is the caller's fault, other than in gRPC."""
    return Code.INVALID_ARGUMENT if isinstance(failure, MalformedMessageError) else failure.code


def _error(failure: Failure) -> Mapping[str, Any]:
    code = _code(failure)
    said: dict[str, Any] = {"code": "canceled" if code is Code.CANCELLED else code.name.lower()}
    if failure.message:
        said["message"] = failure.message
    if isinstance(failure, StatusError):
        return said
    details = []
    for detail in to_status(failure).details:
        shown = json_format.MessageToDict(detail)
        del shown["@type"]
        kind = detail.type_url.rpartition("/")[2]
        details.append({"type": kind, "value": text_of(detail.value), "debug": shown})
    return {**said, "details": details}
