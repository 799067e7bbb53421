"""A worker's status as the failure it was made of."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from millstream.v1 import errors_pb2
from millstream_server.protobuf.errors import error_from_proto
from millstream_server.runtime.errors import (
    Code,
    DeadlinePassedError,
    InternalError,
    RequestCancelledError,
    ServingError,
    UnavailableError,
    WorkerLostError,
)
from millstream_server.runtime.rpc.status import DETAILS_KEY
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_UNKNOWN = errors_pb2.ERROR_REASON_UNSPECIFIED
_CODES: dict[int, type[ServingError]] = {
    Code.CANCELLED: RequestCancelledError,
    Code.DEADLINE_EXCEEDED: DeadlinePassedError,
    Code.RESOURCE_EXHAUSTED: UnavailableError,
    Code.UNAVAILABLE: WorkerLostError,
}
"""Of statuses that gRPC itself made."""
_SENTENCES = {
    Code.CANCELLED: "the request was cancelled",
    Code.DEADLINE_EXCEEDED: "the deadline passed before the worker had ended the request",
    Code.RESOURCE_EXHAUSTED: "the worker can't take a request of this size now",
    Code.UNAVAILABLE: "the worker that ran this request went away; send it again",
}


def error_of(error: grpc.aio.AioRpcError) -> ServingError:
    """Return the failure of a unary call to a worker: the worker's own, or gRPC's."""
    trailers: Any = error.trailing_metadata() or ()
    details = dict(trailers).get(DETAILS_KEY)
    if isinstance(details, bytes):
        return _of_status(status_pb2.Status.FromString(details))
    code = Code(error.code().value[0])
    if code in _CODES:
        return _CODES[code](_SENTENCES[code])
    fault = InternalError.with_id()
    log.error("a call to a worker failed", error_id=fault.error_id, error=error)
    return fault


def _of_status(status: status_pb2.Status) -> ServingError:
    info = error_details_pb2.ErrorInfo()
    bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    found = {
        message.DESCRIPTOR.name
        for message in (info, bad, retry)
        for d in status.details
        if d.Unpack(message)
    }
    name = f"ERROR_REASON_{info.reason}"
    known = errors_pb2.ErrorReason.keys()
    message = errors_pb2.RequestError(
        code=status.code,
        message=status.message,
        reason=errors_pb2.ErrorReason.Value(name) if name in known else _UNKNOWN,
        retryable=info.metadata["retryable"] == "true",
        error_id=info.metadata["error_id"],
        violations=[
            errors_pb2.FieldViolation(field=v.field, description=v.description)
            for v in bad.field_violations
        ],
    )
    if "RetryInfo" in found and retry.retry_delay.ToNanoseconds():
        message.retry_delay.CopyFrom(retry.retry_delay)
    return error_from_proto(message)
