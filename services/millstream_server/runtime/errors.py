"""The suite's failures, each with its gRPC status code and its stable reason.

ServingError
├── InvalidRequestError       INVALID_ARGUMENT     can never succeed as sent; names the fields
│   └── UnsupportedFeatureError                    right in itself, but not with these settings
├── UnauthenticatedError      UNAUTHENTICATED      no credentials this server accepts
├── PermissionDeniedError     PERMISSION_DENIED    known, but not allowed to call this
├── UnknownMethodError        UNIMPLEMENTED        this server has no such method
├── ModelNotFoundError        NOT_FOUND            no pool serves that model
├── RequestCancelledError     CANCELLED            the caller gave up
├── DeadlinePassedError       DEADLINE_EXCEEDED    the caller's time is up
├── OverloadedError           RESOURCE_EXHAUSTED   no room right now; retry after a pause
├── UnavailableError          UNAVAILABLE          retry, elsewhere if possible
│   ├── NoWorkerError                              no worker of a needed role is connected
│   ├── WorkerLostError                            the stream to the worker broke
│   ├── WorkerDrainingError                        the worker is shutting down
│   ├── EngineFailedError                          the engine behind the worker died
│   └── KvTransferError                            the KV cache did not get across
└── InternalError             INTERNAL             our fault; the client gets an opaque id

``reason`` is the name of a value of ``millstream.v1.ErrorReason`` without its prefix. Which bytes
travel on the wire is decided in ``runtime.status`` and nowhere else.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import ClassVar

import grpc


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One invalid field of a request.

    ``field`` is a path as in ``google.rpc.BadRequest``: ``messages[2].role``, ``sampling.top_p``.
    """

    field: str
    description: str


class ServingError(Exception):
    """Base of every failure a service answers with."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    reason: ClassVar[str] = "UNSPECIFIED"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        violations: tuple[FieldViolation, ...] = (),
        retry_delay_s: float | None = None,
        error_id: str = "",
    ) -> None:
        """State what happened in a sentence that helps the caller.

        ``message`` goes to the client: no paths, no addresses, no upstream exception text.
        ``error_id`` finds the log line that has them.
        """
        super().__init__(message)
        self.message = message
        self.violations = violations
        self.retry_delay_s = retry_delay_s
        self.error_id = error_id


class InvalidRequestError(ServingError):
    """The request can never succeed as sent."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequestError:
        """Name one field and what is wrong with it."""
        return cls(f"{field}: {description}", violations=(FieldViolation(field, description),))


class UnsupportedFeatureError(InvalidRequestError):
    """The request is well-formed but asks for something this worker was not started with."""

    reason = "UNSUPPORTED_FEATURE"


class UnauthenticatedError(ServingError):
    """The call carries no credentials this server accepts; missing and wrong ones look alike."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(ServingError):
    """The server knows who calls, and that caller is not allowed to."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class UnknownMethodError(ServingError):
    """This server has no such method; another may."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNKNOWN_METHOD"


class ModelNotFoundError(ServingError):
    """Nobody serves the model that was asked for."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class RequestCancelledError(ServingError):
    """The caller cancelled."""

    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"


class DeadlinePassedError(ServingError):
    """The caller's deadline passed before the answer was complete."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class OverloadedError(ServingError):
    """There is no room right now."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"
    retryable = True


class UnavailableError(ServingError):
    """Something this request needs is away; the same request may succeed elsewhere or later."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"
    retryable = True


class NoWorkerError(UnavailableError):
    """No worker of a needed role is connected and serving."""

    reason = "NO_WORKER"


class WorkerLostError(UnavailableError):
    """The stream to the worker broke while it carried this request."""

    reason = "WORKER_LOST"


class WorkerDrainingError(UnavailableError):
    """The worker is shutting down and takes no new requests."""

    reason = "WORKER_DRAINING"


class EngineFailedError(UnavailableError):
    """The engine behind the worker died."""

    reason = "ENGINE_FAILED"


class KvTransferError(UnavailableError):
    """The KV cache did not arrive from prefill at decode."""

    reason = "KV_TRANSFER_FAILED"


class InternalError(ServingError):
    """A fault of ours."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    @classmethod
    def with_id(cls) -> InternalError:
        """Make one with a fresh id, under which the caller logs what really happened."""
        error_id = secrets.token_hex(8)
        return cls(f"internal error; quote id {error_id} to the operator", error_id=error_id)
