"""Errors as gRPC statuses: `google.rpc.Status` with ErrorInfo, BadRequest and RetryInfo."""

from __future__ import annotations

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from millstream_server.runtime.errors import Code, Failure, ServingError, StatusError

DOMAIN = "millstream.io"
DETAILS_KEY = "grpc-status-details-bin"
"""Trailer that carries the serialized Status, as every gRPC library expects it."""


PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Trailer that makes gRPC's own retries wait as long as RetryInfo (gRFC A6)."""


GRPC_CODES = {Code(code.value[0]): code for code in grpc.StatusCode}
"""Our codes as grpcio's."""


def to_trailers(error: Failure) -> tuple[tuple[str, str | bytes], ...]:
    """Return an error's trailing metadata; a `StatusError` has none."""
    if isinstance(error, StatusError):
        return ()
    details = (DETAILS_KEY, to_status(error).SerializeToString())
    if not error.retryable or not error.retry_delay_s:
        return (details,)
    return details, (PUSHBACK_KEY, str(int(1000 * error.retry_delay_s)))


def to_status(error: ServingError) -> status_pb2.Status:
    """Make an error's rich status."""
    status = status_pb2.Status(code=int(error.code), message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    info.metadata["retryable"] = "true" if error.retryable else "false"
    if error.error_id:
        info.metadata["error_id"] = error.error_id
    status.details.add().Pack(info)
    if error.violations:
        status.details.add().Pack(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=v.field, description=v.description
                    )
                    for v in error.violations
                ]
            )
        )
    if error.retryable:
        delay = Duration()
        delay.FromMilliseconds(int(1000 * (error.retry_delay_s or 0)))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status
