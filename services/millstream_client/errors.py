"""The client's exceptions; each has the details of the server's status.

MillstreamError
├── InvalidRequestError       INVALID_ARGUMENT     can never succeed as sent; `violations`
│   └── MediaFileError                             an image's or video's file can't be read, here
├── MessageTooLargeError      RESOURCE_EXHAUSTED   a message exceeds a size limit
├── NotFoundError             NOT_FOUND            the model or the LoRA adapter isn't served
├── OverloadedError           RESOURCE_EXHAUSTED   no capacity now; `retry_delay_s`
├── UnavailableError          UNAVAILABLE          no server reached, or no worker available
│   └── IncompleteAnswerError                      the stream ended before the answer did
├── DeadlineExceededError     DEADLINE_EXCEEDED    the time that was given has passed
├── RequestCancelledError     CANCELLED            cancelled, here or at the server
├── AnswerFormatError         OUT_OF_RANGE         the answer came, but isn't what was asked for
├── ToolRoundsError           OUT_OF_RANGE         the model goes on calling tools
├── UnauthenticatedError      UNAUTHENTICATED      no API key, or a wrong one
├── PermissionDeniedError     PERMISSION_DENIED    the key doesn't allow this
└── InternalError             INTERNAL             the server's fault; `error_id`

``reason`` is the detailed cause: a name of ``millstream.v1.ErrorReason`` without its prefix, or, of
a connection that failed, `SERVER_NOT_REACHED` or `CONNECTION_LOST`, this library's own. Empty:
another failure of gRPC's, or of a proxy's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from millstream.v1 import errors_pb2

if TYPE_CHECKING:
    from millstream_client.answers import Answer

_DOMAIN = "millstream.io"
SERVER_NOT_REACHED = "SERVER_NOT_REACHED"
"""No connection could be made, so nothing was sent."""
CONNECTION_LOST = "CONNECTION_LOST"
"""The connection broke before the call ended: the server died, or the network failed."""
_CHANNEL_CLOSED = "Channel closed!"
_STATUS_LOST = "Internal error from Core"
"""grpc.aio's text for any status that arrives during a write (grpc issue 36066)."""
_ON_THE_WAY = (
    (
        SERVER_NOT_REACHED,
        "no server was reached",
        ("failed to connect", "connection refused", "dns resolution failed", "name resolution"),
    ),
    (
        CONNECTION_LOST,
        "the connection to the server broke before the call ended; send the request again",
        (
            *("socket closed", "stream removed", "connection reset", "broken pipe", "goaway"),
            *("keepalive", "ping timeout", "connection timed out", "transport closed"),
        ),
    ),
)
"""Reasons, sentences, and their signs in gRPC's texts, in lower case; the first that fits."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One invalid field; ``field`` is a path such as ``start.messages[2].role``."""

    field: str
    description: str


class MillstreamError(Exception):
    """A call failed; the gRPC error is its ``__cause__``."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        violations: Iterable[FieldViolation] = (),
        retry_delay_s: float | None = None,
        retryable: bool = False,
        error_id: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code or self.code
        self.message = message
        self.reason = reason
        self.violations = tuple(violations)
        self.retry_delay_s = retry_delay_s
        """None: the server gave none; 0: at once."""
        self.retryable = retryable
        """Whether the same request may succeed if sent again, later or to another server."""
        self.error_id = error_id
        """Id of the server's log line."""
        self.request_id = ""
        """The failed request's id; empty if it has none."""
        self.partial: Answer | None = None
        """The part of the answer received before a stream failed."""

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        parts = [f"{self.code.name}{reason}: {self.message}", *self.unsaid()]
        if self.retry_delay_s:
            parts.append(f"try again in {self.retry_delay_s:g} s")
        if self.request_id:
            parts.append(f"request {self.request_id}")
        return "; ".join(parts)

    def unsaid(self) -> list[str]:
        """Return the violations that the message doesn't tell already."""
        told = (f"{v.field}: {v.description}" for v in self.violations)
        return [each for each in told if each not in self.message]


class InvalidRequestError(MillstreamError):
    """The request can never succeed as sent."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class MediaFileError(InvalidRequestError):
    """An image's or a video's file can't be read on this machine; nothing was sent."""


class MessageTooLargeError(MillstreamError):
    """A message exceeds a size limit, the server's or ours."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NotFoundError(MillstreamError):
    """The requested model, or its LoRA adapter, isn't served."""

    code = grpc.StatusCode.NOT_FOUND


class OverloadedError(MillstreamError):
    """There is no capacity now, or the caller's quota is used up."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(MillstreamError):
    """No server was reached, or something that the request needs is not available."""

    code = grpc.StatusCode.UNAVAILABLE


class IncompleteAnswerError(UnavailableError):
    """The stream ended without an error before the answer was complete."""


class DeadlineExceededError(MillstreamError):
    """The time that was given has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class RequestCancelledError(MillstreamError):
    """The call was cancelled: at the server, or here by another task than the reader."""

    code = grpc.StatusCode.CANCELLED


class AnswerFormatError(MillstreamError):
    """The answer is no object of the type that was asked for: `partial` is what came.

    ``reason`` is this library's own: `ANSWER_CUT_OFF`, `ANSWER_NOT_PARSED`, or, of a tool call's
    arguments, `TOOL_CALL_INCOMPLETE`.
    """

    code = grpc.StatusCode.OUT_OF_RANGE


class ToolRoundsError(MillstreamError):
    """A run of tools has had as many rounds as it may, and the model calls again: see `partial`."""

    code = grpc.StatusCode.OUT_OF_RANGE


class UnauthenticatedError(MillstreamError):
    """The server requires an API key, and got none or an unknown one."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(MillstreamError):
    """The API key is known but doesn't allow this call."""

    code = grpc.StatusCode.PERMISSION_DENIED


class InternalError(MillstreamError):
    """A bug or defect of the server; its log has details under ``error_id``."""

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


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_REASONS = frozenset(errors_pb2.ErrorReason.values())


def from_rpc_error(error: Any) -> MillstreamError:
    """Convert a failed RPC, asyncio or sync, with the rich status in its trailers."""
    code: grpc.StatusCode = error.code() or grpc.StatusCode.UNKNOWN
    message: str = error.details() or ""
    found = _packed(error, code, message)
    info = found.get(error_details_pb2.ErrorInfo)
    if info is not None and info.domain != _DOMAIN:
        info = None
    if info is None and code is grpc.StatusCode.INTERNAL and message == _STATUS_LOST:
        code, message = grpc.StatusCode.UNAVAILABLE, "the stream ended while a message was sent"
    reason = info.reason if info is not None else ""
    if not found and code is grpc.StatusCode.UNAVAILABLE:
        reason, message = _on_the_way(message)
    kind = _CLASSES.get(code, MillstreamError)
    if kind is OverloadedError and info is None and "larger than max" in message:
        kind = MessageTooLargeError
    invalid = found.get(error_details_pb2.BadRequest)
    retry = found.get(error_details_pb2.RetryInfo)
    failed = kind(
        message,
        code=code,
        reason=reason,
        violations=_violations(invalid.field_violations) if invalid is not None else (),
        retry_delay_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry is not None else None,
        retryable=_is_retryable(info, code, message),
        error_id=info.metadata["error_id"] if info is not None else "",
    )
    failed.__cause__ = error
    return failed


def _on_the_way(text: str) -> tuple[str, str]:
    """Return reason and sentence of a failure on the way to a server, by gRPC's text."""
    lower = text.lower()
    for reason, sentence, signs in _ON_THE_WAY:
        if any(sign in lower for sign in signs):
            return reason, f"{sentence} ({text})"
    return "", text


def from_request_error(message: errors_pb2.RequestError) -> MillstreamError:
    """Convert the failure of one request on a stream."""
    code = _CODES.get(message.code, grpc.StatusCode.UNKNOWN)
    name = errors_pb2.ErrorReason.Name(message.reason) if message.reason in _REASONS else ""
    return _CLASSES.get(code, MillstreamError)(
        message.message,
        code=code,
        reason=name.removeprefix("ERROR_REASON_"),
        violations=_violations(message.violations),
        retry_delay_s=message.retry_delay.ToNanoseconds() / 1e9
        if message.HasField("retry_delay")
        else None,
        retryable=message.retryable,
        error_id=message.error_id,
    )


def _packed(error: Any, code: grpc.StatusCode, text: str) -> dict[type[Any], Any]:
    """Return the details of the `google.rpc.Status` in the trailer; empty without a valid one."""
    found: dict[type[Any], Any] = {}
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            continue
        if (status.code, status.message) != (code.value[0], text):
            continue
        for packed in status.details:
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


def _violations(sent: Iterable[Any]) -> Iterator[FieldViolation]:
    return (FieldViolation(v.field, v.description) for v in sent)


def _is_retryable(info: Any | None, code: grpc.StatusCode, message: str) -> bool:
    """Return the server's flag; without one, whether the code is a transport's temporary failure.

    That includes CANCELLED: a server that stops drops calls that it hasn't accepted yet. Cancels on
    this side are handled before, unless the channel itself was closed.
    """
    if info is not None and "retryable" in info.metadata:
        return bool(info.metadata["retryable"] == "true")
    if code is grpc.StatusCode.CANCELLED:
        return message != _CHANNEL_CLOSED
    return code is grpc.StatusCode.UNAVAILABLE
