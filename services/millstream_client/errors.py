"""Failures, as callers branch on them; each holds what the server's status said.

MillstreamError
├── InvalidRequestError       INVALID_ARGUMENT     can never succeed as sent; `violations`
├── MessageTooLargeError      RESOURCE_EXHAUSTED   a message exceeds a size limit
├── NotFoundError             NOT_FOUND            nobody serves that model
├── OverloadedError           RESOURCE_EXHAUSTED   no room right now; `retry_delay_s`
├── UnavailableError          UNAVAILABLE          not reached, or something it needs is away
│   └── IncompleteAnswerError                      the stream ended before the answer did
├── DeadlineExceededError     DEADLINE_EXCEEDED    the time that was given has passed
├── RequestCancelledError     CANCELLED            somebody cancelled
├── UnauthenticatedError      UNAUTHENTICATED      no API key, or a wrong one
├── PermissionDeniedError     PERMISSION_DENIED    the key isn't for this
└── InternalError             INTERNAL             the server's fault; `error_id`

``reason`` is the finer cause: a name of ``millstream.v1.ErrorReason`` without its prefix, empty
when the failure isn't Millstream's but gRPC's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from millstream_client.answers import Answer

_DOMAIN = "millstream.io"
_CHANNEL_CLOSED = "Channel closed!"
_STATUS_LOST = "Internal error from Core"
"""What grpc.aio makes of any status that arrives while a message is written (grpc issue 36066)."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One invalid field; ``field`` is a path such as ``start.messages[2].role``."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What a status says beside its code and message."""

    reason: str = ""
    violations: tuple[FieldViolation, ...] = ()
    retry_delay_s: float | None = None
    """None: the server didn't say; 0: at once."""
    retryable: bool = False
    error_id: str = ""


class MillstreamError(Exception):
    """A call failed; the gRPC error is its ``__cause__``."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        details: Details = Details(),
        *,
        code: grpc.StatusCode | None = None,
    ) -> None:
        """Say what failed; ``code`` if it isn't the class's own."""
        super().__init__(message)
        self.code = code or self.code
        self.message = message
        self.reason = details.reason
        self.violations = details.violations
        self.retry_delay_s = details.retry_delay_s
        self.retryable = details.retryable
        """Whether the same request may succeed if sent again, elsewhere or later."""
        self.error_id = details.error_id
        """Finds the server's log line."""
        self.request_id = ""
        """Of the request that failed; empty for those that have none."""
        self.partial: Answer | None = None
        """The answer as far as it came, when a stream failed."""

    def __str__(self) -> str:
        """Give code, reason, message, fields and id in a line."""
        reason = f" ({self.reason})" if self.reason else ""
        parts = [f"{self.code.name}{reason}: {self.message}"]
        parts += [f"{v.field}: {v.description}" for v in self.violations]
        if self.retry_delay_s:
            parts.append(f"try again in {self.retry_delay_s:g} s")
        if self.request_id:
            parts.append(f"request {self.request_id}")
        return "; ".join(parts)


class InvalidRequestError(MillstreamError):
    """The request can never succeed as sent."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class MessageTooLargeError(MillstreamError):
    """A message exceeds a size limit, the server's or ours."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NotFoundError(MillstreamError):
    """Nobody serves the model that was asked for."""

    code = grpc.StatusCode.NOT_FOUND


class OverloadedError(MillstreamError):
    """There is no room right now, or the caller's quota is used up."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(MillstreamError):
    """No server was reached, or something that the request needs is away."""

    code = grpc.StatusCode.UNAVAILABLE


class IncompleteAnswerError(UnavailableError):
    """The stream ended without an error, yet before the answer was finished."""


class DeadlineExceededError(MillstreamError):
    """The time that was given has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class RequestCancelledError(MillstreamError):
    """The call was cancelled: here, by someone else than the task that reads it, or there."""

    code = grpc.StatusCode.CANCELLED


class UnauthenticatedError(MillstreamError):
    """The server wants an API key and got none, or none that it knows."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(MillstreamError):
    """The API key is known but isn't for this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class InternalError(MillstreamError):
    """A fault of the server; the operator finds more under ``error_id``."""

    code = grpc.StatusCode.INTERNAL


_CLASSES: dict[grpc.StatusCode, type[MillstreamError]] = {
    kind.code: kind
    for kind in (
        InvalidRequestError,
        NotFoundError,
        OverloadedError,
        UnavailableError,
        DeadlineExceededError,
        RequestCancelledError,
        UnauthenticatedError,
        PermissionDeniedError,
        InternalError,
    )
}


def from_rpc_error(error: Any) -> MillstreamError:
    """Read a failed RPC, ``grpc.aio``'s or a sync one's, with the rich status in its trailer."""
    code: grpc.StatusCode = error.code() or grpc.StatusCode.UNKNOWN
    message: str = error.details() or ""
    found = _packed(error)
    info = found.get(error_details_pb2.ErrorInfo)
    if info is not None and info.domain != _DOMAIN:
        info = None
    if info is None and code is grpc.StatusCode.INTERNAL and message == _STATUS_LOST:
        code, message = grpc.StatusCode.UNAVAILABLE, "the stream ended while a message was sent"
    kind = _CLASSES.get(code, MillstreamError)
    if kind is OverloadedError and info is None and "larger than max" in message:
        kind = MessageTooLargeError
    details = Details(
        reason=info.reason if info is not None else "",
        violations=_violations(found.get(error_details_pb2.BadRequest)),
        retry_delay_s=_delay_s(found.get(error_details_pb2.RetryInfo)),
        retryable=_is_retryable(info, code, message),
        error_id=info.metadata["error_id"] if info is not None else "",
    )
    failed = kind(message, details, code=code)
    failed.__cause__ = error
    return failed


def _packed(error: Any) -> dict[type[Any], Any]:
    """Unpack the `google.rpc.Status` in the trailer; empty when there is none that fits."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        return {}
    found: dict[type[Any], Any] = {}
    for packed in status.details if status is not None else ():
        for kind in _KINDS:
            message = kind()
            if packed.Unpack(message):
                found[kind] = message
    return found


_KINDS: tuple[type[Any], ...] = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.RetryInfo,
)


def _violations(request: Any | None) -> tuple[FieldViolation, ...]:
    if request is None:
        return ()
    return tuple(FieldViolation(v.field, v.description) for v in request.field_violations)


def _delay_s(retry: Any | None) -> float | None:
    return None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9


def _is_retryable(info: Any | None, code: grpc.StatusCode, message: str) -> bool:
    """Believe the server; where it said nothing, what the way there does to a call may pass.

    CANCELLED comes that way too: a server that stops drops what arrived but wasn't looked at yet.
    What was cancelled on this side is told apart before, unless somebody closed the channel itself.
    """
    if info is not None and "retryable" in info.metadata:
        return bool(info.metadata["retryable"] == "true")
    if code is grpc.StatusCode.CANCELLED:
        return message != _CHANNEL_CLOSED
    return code is grpc.StatusCode.UNAVAILABLE
