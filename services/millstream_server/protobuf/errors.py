"""Conversion of one request's failure to a message and back."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from millstream.v1 import errors_pb2
from millstream_server.runtime import errors
from millstream_server.runtime.errors import FieldViolation, ServingError

_ERRORS_BY_REASON: dict[int, type[ServingError]] = {
    errors_pb2.ErrorReason.Value("ERROR_REASON_" + cls.reason): cls
    for cls in (
        errors.InvalidRequestError,
        errors.UnsupportedFeatureError,
        errors.ModelNotFoundError,
        errors.AdapterNotFoundError,
        errors.AdapterExistsError,
        errors.OperationConflictError,
        errors.EngineBusyError,
        errors.InvalidWeightsError,
        errors.RequestCancelledError,
        errors.DeadlinePassedError,
        errors.OverloadedError,
        errors.UnavailableError,
        errors.NoWorkerError,
        errors.WorkerLostError,
        errors.WorkerDrainingError,
        errors.WorkerPausedError,
        errors.EngineFailedError,
        errors.KvTransferError,
        errors.EmbeddingTransferError,
        errors.MediaFetchError,
        errors.StorageError,
        errors.InternalError,
        errors.UnauthenticatedError,
        errors.PermissionDeniedError,
        errors.UnknownMethodError,
    )
}


def error_to_proto(error: ServingError) -> errors_pb2.RequestError:
    """Convert one request's failure to a message."""
    message = errors_pb2.RequestError(
        code=int(error.code),
        reason=errors_pb2.ErrorReason.Value("ERROR_REASON_" + error.reason),
        message=error.message,
        retryable=error.retryable,
        violations=[
            errors_pb2.FieldViolation(field=v.field, description=v.description)
            for v in error.violations
        ],
        error_id=error.error_id,
    )
    if error.retry_delay_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_delay_s * 1e9))
        message.retry_delay.CopyFrom(delay)
    return message


def error_from_proto(message: errors_pb2.RequestError) -> ServingError:
    """Convert a message to a failure; an unknown, newer reason keeps whether to retry."""
    fallback = errors.UnavailableError if message.retryable else errors.InternalError
    cls = _ERRORS_BY_REASON.get(message.reason, fallback)
    return cls(
        message.message,
        violations=tuple(FieldViolation(v.field, v.description) for v in message.violations),
        retry_delay_s=message.retry_delay.ToNanoseconds() / 1e9
        if message.HasField("retry_delay")
        else None,
        error_id=message.error_id,
    )
