"""A model's weight files: which they are, what they hold, and a digest that tells models apart.

Headers of safetensors files are read without the library and without torch. Such a file is 8 bytes
(the header's length, little-endian), a JSON object that maps each tensor's name to its type, shape
and place, and the tensors' bytes, row-major and little-endian.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_INDEX = "model.safetensors.index.json"
_SUFFIXES = (".bin", ".pt", ".pth", ".gguf")
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""
_ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


def weight_files(model_path: Path) -> list[Path]:
    """List them by name: those that the index names, else safetensors files, else others.

    Raises:
        OSError: there is no such directory.
    """
    found = sorted(model_path.iterdir())
    tensors = [path for path in found if path.suffix == ".safetensors"]
    indexed = _indexed(model_path / _INDEX)
    return (
        [path for path in tensors if path.name in indexed]
        or tensors
        or [path for path in found if path.suffix in _SUFFIXES]
    )


def _indexed(index: Path) -> frozenset[str]:
    """Return the names in an index; none if there is no usable one."""
    try:
        return frozenset(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return frozenset()


def fingerprint(model_path: Path) -> str:
    """Return the SHA-256, in hex, of a model's config.json and of its weight files' outsides.

    These are their names, sizes and, of safetensors files, headers: names, types and shapes of all
    tensors. Reads no weights, so models that differ in numbers only have the same. Empty: there are
    no weight files, or a file can't be read.
    """
    hashed = hashlib.sha256(b"millstream-model-v1")
    try:
        files = weight_files(model_path)
        for part in _parts(model_path, files):
            hashed.update(len(part).to_bytes(8, "big"))
            hashed.update(part)
    except (OSError, ValueError):
        return ""
    return hashed.hexdigest() if files else ""


def _parts(model_path: Path, files: list[Path]) -> Iterator[bytes]:
    config = model_path / "config.json"
    yield config.read_bytes() if config.is_file() else b""
    for file in files:
        yield file.name.encode()
        yield file.stat().st_size.to_bytes(8, "big")
        if file.suffix == ".safetensors":
            with file.open("rb") as opened:
                yield raw_header(opened)


def raw_header(opened: IO[bytes]) -> bytes:
    """Read the JSON at the start of a safetensors file.

    Raises:
        ValueError: it is too long to be one.
    """
    length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a safetensors header of {length} bytes")
    return opened.read(length)


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
