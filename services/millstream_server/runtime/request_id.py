"""Ids of requests: checks of those that callers give, and new ones."""

from __future__ import annotations

import os

from millstream_server.runtime.errors import FieldViolation, InvalidRequestError

MAX_REQUEST_ID_BYTES = 128


def new_request_id() -> str:
    """Make an id for a request whose client sent none.

    From the system: of Python's own numbers clients could tell the next ones, seeds among them.
    """
    return f"req-{os.urandom(8).hex()}"


def check_length(request_id: str) -> None:
    """Check the length of an id, which may have any characters.

    Raises:
        InvalidRequestError: it is too long.
    """
    if found := _length(request_id, "request_id"):
        raise InvalidRequestError.of_all(found)


def short_text_violations(text: str, field: str = "request_id") -> list[FieldViolation]:
    """Return why a client's id, name or key, sent in ``field``, can't be used."""
    found = _length(text, field)
    if not text.isprintable():  # it goes into log lines
        found.append(FieldViolation(field, "must be printable"))
    return found


def _length(request_id: str, field: str) -> list[FieldViolation]:
    nbytes = len(request_id.encode())
    if nbytes <= MAX_REQUEST_ID_BYTES:
        return []
    why = f"has {nbytes} bytes; at most {MAX_REQUEST_ID_BYTES} bytes are allowed"
    return [FieldViolation(field, why)]
