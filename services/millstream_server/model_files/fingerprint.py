"""A digest of a model's files that tells models apart without reading their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from millstream_server.model_files.weights import weight_files

_MOST_HEADER_BYTES = 1 << 27


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
            yield _header(file)


def _header(file: Path) -> bytes:
    """Read a safetensors file's header; the format is documented by safetensors."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"a safetensors header of {length} bytes")
        return opened.read(length)
