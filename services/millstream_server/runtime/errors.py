"""The suite's failures, each with its gRPC status code and its stable reason.

ServingError
├── InvalidRequestError       INVALID_ARGUMENT     can never succeed as sent; names the fields
│   └── UnsupportedFeatureError                    valid, but not with this worker's settings
├── UnauthenticatedError      UNAUTHENTICATED      no credentials this server accepts
├── PermissionDeniedError     PERMISSION_DENIED    the caller is known, but may not call this
├── UnknownMethodError        UNIMPLEMENTED        this server has no such method
├── UnsupportedMethodError    UNIMPLEMENTED        the method is for servers of another kind
├── ModelNotFoundError        NOT_FOUND            no pool serves that model
├── AdapterNotFoundError      NOT_FOUND            no worker has loaded that LoRA adapter
├── AdapterExistsError        ALREADY_EXISTS       a LoRA adapter of that name is loaded
├── OperationConflictError    FAILED_PRECONDITION  another operation runs, or it contradicts one
├── EngineBusyError           FAILED_PRECONDITION  the engine must be idle, and isn't
├── InvalidWeightsError       FAILED_PRECONDITION  weights or an adapter don't fit to the model
├── RequestCancelledError     CANCELLED            the caller gave up
├── DeadlinePassedError       DEADLINE_EXCEEDED    the caller's time is up
├── OverloadedError           RESOURCE_EXHAUSTED   no capacity now; retry after a pause
├── RepeatedLossError         ABORTED              two workers were lost while they ran it
├── ReplayDifferedError       ABORTED              run again, it gave other tokens
├── UnavailableError          UNAVAILABLE          retry, on another server if possible
│   ├── NoWorkerError                              no worker of a needed role is connected
│   ├── WorkerLostError                            the stream to the worker broke
│   ├── WorkerDrainingError                        the worker is shutting down
│   ├── WorkerPausedError                          an operator took the worker out of service
│   ├── EngineFailedError                          the engine behind the worker died
│   ├── KvTransferError                            the KV cache was not transferred
│   ├── EmbeddingTransferError                     an embedding was not transferred
│   ├── MediaFetchError                            a client's URL was not delivered
│   └── StorageError                               an output was not written to storage
└── InternalError             INTERNAL             a bug or defect here; the client gets an id

``reason`` is the name of a value of ``millstream.v1.ErrorReason`` without its prefix. Which bytes
are sent is decided in ``runtime.rpc.status`` only.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self


class Code(enum.IntEnum):
    """gRPC's status codes, by their numbers on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


SERVER_FAULTS = frozenset(
    {
        Code.UNKNOWN,
        Code.RESOURCE_EXHAUSTED,
        Code.ABORTED,
        Code.INTERNAL,
        Code.UNAVAILABLE,
        Code.DATA_LOSS,
    }
)
"""Codes that count as errors in load reports: not invalid requests, and not cancelled ones."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One invalid field of a request.

    ``field`` is a path as in ``google.rpc.BadRequest``: ``messages[2].role``, ``sampling.top_p``.
    """

    field: str
    description: str


class StatusError(Exception):
    """A status of another protocol, such as health's NOT_FOUND; it has no `ErrorReason`."""

    def __init__(self, code: Code, message: str) -> None:
        """``message`` goes to the client."""
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def reason(self) -> str:
        return self.code.name


class MalformedMessageError(StatusError):
    """A message can't be unpacked or parsed, or is one too many.

    gRPC's table of codes has INTERNAL for it, from servers, too (doc/statuscodes.md).
    """

    def __init__(self, message: str) -> None:
        super().__init__(Code.INTERNAL, message)


class ServingError(Exception):
    """Base of every failure a service reports."""

    code: ClassVar[Code] = Code.UNKNOWN
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
        The log line with ``error_id`` has them.
        """
        super().__init__(message)
        self.message = message
        self.violations = violations
        self.retry_delay_s = retry_delay_s
        self.error_id = error_id


class InvalidRequestError(ServingError):
    """The request can never succeed as sent."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    @classmethod
    def of(cls, field: str, description: str) -> Self:
        """Name one field and what is wrong with it."""
        return cls(f"{field}: {description}", violations=(FieldViolation(field, description),))

    @classmethod
    def of_all(cls, violations: Sequence[FieldViolation]) -> Self:
        """Make one error of at least one violation."""
        sentences = "; ".join(f"{found.field}: {found.description}" for found in violations)
        return cls(sentences, violations=tuple(violations))

    def at(self, renamed: Callable[[str], str]) -> Self:
        """Return the same error of other fields; itself if it names none."""
        found = [FieldViolation(renamed(v.field), v.description) for v in self.violations]
        return type(self).of_all(found) if found else self


class UnsupportedFeatureError(InvalidRequestError):
    """The request is valid but needs a setting that this worker was not started with."""

    reason = "UNSUPPORTED_FEATURE"


class UnauthenticatedError(ServingError):
    """The call has no valid credentials; missing and wrong ones get the same error."""

    code = Code.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(ServingError):
    """The caller is known, but is not allowed to call this."""

    code = Code.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class UnknownMethodError(ServingError):
    """This server has no such method."""

    code = Code.UNIMPLEMENTED
    reason = "UNKNOWN_METHOD"


class UnsupportedMethodError(ServingError):
    """The service has the method, but it is served by servers of another kind."""

    code = Code.UNIMPLEMENTED
    reason = "UNSUPPORTED_FEATURE"


class ModelNotFoundError(ServingError):
    """The requested model is not served here."""

    code = Code.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class AdapterNotFoundError(ServingError):
    """No worker of the model has loaded this LoRA adapter."""

    code = Code.NOT_FOUND
    reason = "ADAPTER_NOT_FOUND"


class AdapterExistsError(ServingError):
    """A LoRA adapter of this name is loaded already."""

    code = Code.ALREADY_EXISTS
    reason = "ADAPTER_EXISTS"


class OperationConflictError(ServingError):
    """Another operation runs on the engine, or this one contradicts its state."""

    code = Code.FAILED_PRECONDITION
    reason = "OPERATION_CONFLICT"


class EngineBusyError(ServingError):
    """The engine must be idle for this, and requests are open."""

    code = Code.FAILED_PRECONDITION
    reason = "ENGINE_BUSY"


class InvalidWeightsError(ServingError):
    """Weights or an adapter don't fit to the model, or their files aren't complete."""

    code = Code.FAILED_PRECONDITION
    reason = "INVALID_WEIGHTS"


class RequestCancelledError(ServingError):
    """The caller cancelled."""

    code = Code.CANCELLED
    reason = "CANCELLED"


class DeadlinePassedError(ServingError):
    """The caller's deadline passed before the response was complete."""

    code = Code.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class OverloadedError(ServingError):
    """There is no capacity now; the request may be retried after a pause."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"
    retryable = True


class RepeatedLossError(ServingError):
    """Two workers were lost while they ran the request: it may be what ends them."""

    code = Code.ABORTED
    reason = "REPEATED_LOSS"


class ReplayDifferedError(ServingError):
    """The worker was lost, and another one drew other tokens than the client has."""

    code = Code.ABORTED
    reason = "REPLAY_DIFFERED"


class UnavailableError(ServingError):
    """Something that the request needs is not available; a retry may succeed here or elsewhere."""

    code = Code.UNAVAILABLE
    reason = "UNAVAILABLE"
    retryable = True


class NoWorkerError(UnavailableError):
    """No worker of a needed role is connected and serving."""

    reason = "NO_WORKER"
    may_come_s = 0.0
    """How long it may take until discovery finds the next one: the last one has just left."""


class WorkerLostError(UnavailableError):
    """The stream to the worker broke while it carried this request."""

    reason = "WORKER_LOST"
    was_leaving = False
    """Whether the worker had announced its shutdown: then the request isn't what ended it."""
    open_requests = 0
    """How many requests of this server it ran then."""


class WorkerDrainingError(UnavailableError):
    """The worker is shutting down and accepts no new requests."""

    reason = "WORKER_DRAINING"


class WorkerPausedError(UnavailableError):
    """An operator took the worker out of service for a while."""

    reason = "WORKER_PAUSED"


class EngineFailedError(UnavailableError):
    """The engine behind the worker died."""

    reason = "ENGINE_FAILED"
    open_requests = 0
    """How many requests of this server it ran then."""


class KvTransferError(UnavailableError):
    """The KV cache did not arrive from prefill at decode."""

    reason = "KV_TRANSFER_FAILED"


class EmbeddingTransferError(UnavailableError):
    """The embedding of an image or a video did not reach the worker that needed it."""

    reason = "EMBEDDING_TRANSFER_FAILED"


class MediaFetchError(UnavailableError):
    """The server that a client's URL names did not deliver an image or a video."""

    reason = "MEDIA_FETCH_FAILED"


class StorageError(UnavailableError):
    """An output couldn't be written to the worker's storage; nothing is left there."""

    reason = "STORAGE_FAILED"


class InternalError(ServingError):
    """A bug or defect of the server."""

    code = Code.INTERNAL
    reason = "INTERNAL"

    @classmethod
    def with_id(cls) -> InternalError:
        """Make one with a new error id; the code that catches it logs the cause with that id."""
        error_id = secrets.token_hex(8)
        return cls(f"internal error; quote id {error_id} to the operator", error_id=error_id)


Failure = ServingError | StatusError
"""What an RPC can end with."""
