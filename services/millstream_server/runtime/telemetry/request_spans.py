"""How a request's failure appears in metrics and in its span."""

from __future__ import annotations

from opentelemetry.trace import Span, Status, StatusCode

from millstream_server.runtime.errors import ServingError


def reason_of(error: BaseException | None) -> str:
    """Return the contract's name of a failure; INTERNAL for other exceptions."""
    if error is None:
        return ""
    if isinstance(error, ServingError):
        return error.reason
    return "INTERNAL" if isinstance(error, Exception) else "CANCELLED"


def fail(span: Span, reason: str, error: BaseException | None) -> None:
    """Mark a span as failed; only messages meant for callers are recorded."""
    message = error.message if isinstance(error, ServingError) else ""
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, message or reason))
