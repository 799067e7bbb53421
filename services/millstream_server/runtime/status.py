"""Failures on the wire: `google.rpc.Status` with ErrorInfo, BadRequest and RetryInfo."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from millstream_server.runtime.errors import ServingError

DOMAIN = "millstream.io"
DETAILS_KEY = "grpc-status-details-bin"
"""Trailer that carries the serialized Status, as every gRPC library expects it."""


PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Trailer by which gRPC's own retries wait as long as RetryInfo asks (gRFC A6)."""


def to_trailers(error: ServingError) -> tuple[tuple[str, str | bytes], ...]:
    """Write a failure's trailing metadata."""
    details = (DETAILS_KEY, to_status(error).SerializeToString())
    if not error.retryable or not error.retry_delay_s:
        return (details,)
    return details, (PUSHBACK_KEY, str(int(1000 * error.retry_delay_s)))


def to_status(error: ServingError) -> status_pb2.Status:
    """Build the rich status of a failure."""
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
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
