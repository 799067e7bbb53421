"""Reads the headers of safetensors files, without the library and without torch.

A file is 8 bytes (the header's length, little-endian), a JSON object that maps each tensor's name
to its type, shape and place, and the tensors' bytes, row-major and little-endian.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""
_ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


class BadSafetensorsError(Exception):
    """A file can't be read, isn't a safetensors file, or isn't complete; the text says which."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    name: str
    dtype: str
    """The format's name of its type, such as "BF16"."""
    shape: tuple[int, ...]
    offset: int
    """Where its bytes begin in the file."""
    nbytes: int


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """Return a file's tensors in the order of their bytes; their bytes aren't read.

    Raises:
        BadSafetensorsError: it can't be read, is no such file, or is shorter than it says.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or not 2 <= length <= _MAX_HEADER_BYTES:  # noqa: PLR2004 - {}
                raise BadSafetensorsError(f"{path} isn't a safetensors file")
            if (whole := _LENGTH_BYTES + length) > size:
                raise BadSafetensorsError(
                    f"{path} is cut off: its header ends at byte {whole:,}, the file at {size:,}"
                )
            header = file.read(length)
    except OSError as error:
        raise BadSafetensorsError(f"{path} can't be read: {error.strerror}") from error
    found = [_tensor(path, name, entry, whole) for name, entry in _entries(path, header)]
    end = max((tensor.offset + tensor.nbytes for tensor in found), default=whole)
    if end > size:
        raise BadSafetensorsError(
            f"{path} is cut off: its tensors end at byte {end:,}, the file at {size:,}"
        )
    return tuple(sorted(found, key=lambda tensor: (tensor.offset, tensor.name)))


def _entries(path: Path, header: bytes) -> list[tuple[str, Any]]:
    try:
        read = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise BadSafetensorsError(f"{path} isn't a safetensors file: {error}") from error
    if not isinstance(read, dict):
        raise BadSafetensorsError(f"{path} isn't a safetensors file: its header is no object")
    return [(name, entry) for name, entry in read.items() if name != "__metadata__"]


def _tensor(path: Path, name: str, entry: Any, data_at: int) -> StoredTensor:
    where = f"{path}: the header's entry of {name!r}"
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise BadSafetensorsError(f"{where} lacks dtype, shape or data_offsets") from error
    numbers = [begin, end, *(shape if isinstance(shape, list) else [None])]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise BadSafetensorsError(f"{where} has a shape or offsets that aren't whole numbers")
    element = _ELEMENT_BYTES.get(dtype) if isinstance(dtype, str) else None
    if element is not None and end - begin != (wanted := math.prod(shape) * element):
        raise BadSafetensorsError(
            f"{where} has {end - begin:,} bytes, but {dtype} of the shape {shape} has {wanted:,}"
        )
    if end < begin:
        raise BadSafetensorsError(f"{where} ends before it begins")
    return StoredTensor(name, str(dtype), tuple(shape), data_at + begin, end - begin)
