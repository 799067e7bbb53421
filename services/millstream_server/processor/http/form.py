"""Forms with files: bodies of multipart/form-data (RFC 7578)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from millstream_server.processor.http.schema import violation
from millstream_server.runtime.errors import InvalidRequestError

T = TypeVar("T")

_MOST_FIELDS = 64
_MOST_PARAMETERS = 32
"""Of a header, each with its semicolon: the library takes 1 us for each."""
_IN_LIST = "[]"
"""Clients end the names of lists so."""


def read_form(kind: type[T], body: bytes, content_type: str | bytes) -> T:
    """Read a form; a field that is a file stays bytes.

    Raises:
        InvalidRequestError: it isn't one, or a field has another type or comes twice.
    """
    parts = _Parts()
    form, options = _options(content_type)
    boundary = options.get(b"boundary")
    if form != b"multipart/form-data" or not boundary:
        raise InvalidRequestError("the body must be multipart/form-data, with its boundary")
    try:
        parser = MultipartParser(boundary, parts.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequestError(f"the body is no form: {error}") from None
    try:
        return msgspec.convert(parts.fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise violation(str(error)) from None


def _options(header: str | bytes) -> tuple[bytes, dict[bytes, bytes]]:
    value = header.encode() if isinstance(header, str) else header
    if value.count(b";") > _MOST_PARAMETERS:
        raise InvalidRequestError(f"a form's headers have at most {_MOST_PARAMETERS} parameters")
    return parse_options_header(value)


class _Parts:
    """Takes a form's parts from the parser."""

    def __init__(self) -> None:
        self.fields: dict[str, str | bytes] = {}
        self._names = [bytearray(), bytearray()]
        """The name and the value of the header that is being read."""
        self._disposition = b""
        self._data: list[bytes] = []

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add(1, data[start:end]),
            "on_header_end": self._header,
            "on_part_data": lambda data, start, end: self._data.append(data[start:end]),
            "on_part_end": self._end,
        }

    def _begin(self) -> None:
        self._disposition = b""
        self._data = []

    def _add(self, which: int, data: bytes) -> None:
        self._names[which] += data

    def _header(self) -> None:
        name, value = map(bytes, self._names)
        self._names = [bytearray(), bytearray()]
        if name.lower() == b"content-disposition":
            self._disposition = value

    def _end(self) -> None:
        _, options = _options(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace").removesuffix(_IN_LIST)
        if not name or len(self.fields) == _MOST_FIELDS:
            raise InvalidRequestError(f"a form has 1 to {_MOST_FIELDS} parts, each with a name")
        if name in self.fields:
            raise InvalidRequestError.of(name, "comes twice; one is needed")
        data = b"".join(self._data)
        self.fields[name] = data if b"filename" in options else self._text(name, data)

    def _text(self, name: str, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise InvalidRequestError.of(name, "isn't UTF-8") from None
