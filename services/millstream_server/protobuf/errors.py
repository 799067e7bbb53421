"""Conversion of one request's failure to a message and back.

What a worker sends goes to a client in trailers, twice: as `grpc-message`, where a byte may take
three, and in the status' details, in base64. Clients take 8 KiB of headers, so texts are cut here.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration

from millstream.v1 import errors_pb2
from millstream_server.runtime import errors
from millstream_server.runtime.errors import FieldViolation, ServingError

MAX_RETRY_DELAY_S = 3600.0
"""Longer delays that another process names are cut: a `Duration` can't hold all of them."""
MAX_VIOLATIONS = 16
"""As many as our own checks name (`generation/validation.py`)."""
_MESSAGE_BYTES, _VIOLATIONS_BYTES, _ID_BYTES = 1024, 2048, 128
"""With 16 violations at most 7.7 KB of trailers."""
_MOST_BYTES_OF_A_CHAR = 4
_ELLIPSIS = "…"

_ERRORS_BY_REASON: dict[int, type[ServingError]] = {
    errors_pb2.ErrorReason.Value("ERROR_REASON_" + kind.reason): kind
    for kind in reversed(list(vars(errors).values()))  # of two with one reason the first counts
    if isinstance(kind, type) and issubclass(kind, ServingError) and kind is not ServingError
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
    """Convert a message to a failure; an unknown, newer reason keeps whether to retry.

    Texts are cut and the delay is bounded: it is from another process, and goes to a client.
    """
    fallback = errors.UnavailableError if message.retryable else errors.InternalError
    cls = _ERRORS_BY_REASON.get(message.reason, fallback)
    delay_s = None
    if message.HasField("retry_delay"):
        delay_s = min(max(message.retry_delay.ToNanoseconds() / 1e9, 0.0), MAX_RETRY_DELAY_S)
    return cls(
        _cut(message.message, _MESSAGE_BYTES),
        violations=tuple(_violations(message)),
        retry_delay_s=delay_s,
        error_id=_cut(message.error_id, _ID_BYTES),
    )


def _violations(message: errors_pb2.RequestError) -> Iterator[FieldViolation]:
    """Yield the first violations, each of them whole, as long as there is room."""
    room = _VIOLATIONS_BYTES
    for violation in message.violations[:MAX_VIOLATIONS]:
        field, description = violation.field, violation.description
        room -= len(field.encode()) + len(description.encode())
        if room < 0:
            return
        yield FieldViolation(field, description)


def _cut(text: str, most: int) -> str:
    """Return a text's beginning of at most so many bytes."""
    if len(text) <= most // _MOST_BYTES_OF_A_CHAR:
        return text
    data = text[: most + 1].encode()
    if len(data) <= most:
        return text
    return data[: most - len(_ELLIPSIS.encode())].decode(errors="ignore") + _ELLIPSIS
