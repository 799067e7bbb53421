"""Checks of the ids that callers give their requests."""

from __future__ import annotations

from collections.abc import Iterator

from millstream_server.runtime.errors import FieldViolation, InvalidRequestError

MAX_REQUEST_ID_BYTES = 128


def check_length(request_id: str) -> None:
    """Check the length of an id, which may have any characters.

    Raises:
        InvalidRequestError: it is too long.
    """
    if found := tuple(_length(request_id, "request_id")):
        raise InvalidRequestError.of_all(found)


def request_id_violations(request_id: str, field: str = "request_id") -> Iterator[FieldViolation]:
    """Yield why a client's id, sent in ``field``, can't be used."""
    return short_text_violations(request_id, field)


def short_text_violations(text: str, field: str) -> Iterator[FieldViolation]:
    """Yield why a client's name or key, sent in ``field``, can't be used."""
    yield from _length(text, field)
    if not text.isprintable():  # it goes into log lines
        yield FieldViolation(field, "must be printable")


def _length(request_id: str, field: str) -> Iterator[FieldViolation]:
    nbytes = len(request_id.encode())
    if nbytes > MAX_REQUEST_ID_BYTES:
        why = f"has {nbytes} bytes; at most {MAX_REQUEST_ID_BYTES} bytes are allowed"
        yield FieldViolation(field, why)
