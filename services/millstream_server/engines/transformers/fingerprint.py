"""A digest of a model's processor settings and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_SETTINGS = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_SAMPLE_BYTES = 1024
_TOWER_NAMES = ("visual", "vision", "multi_modal_projector")
_MAX_HEADER_BYTES = 1 << 27


def settings_digest(model_path: Path, kind: str) -> bytes:
    """Return the SHA-256 of what an embedding depends on besides the item.

    Of the weights it covers the files' names, sizes and headers, and the start of every tensor of
    the tower: the whole would take seconds per GB, and training changes all tensors that it changes
    at all.
    """
    hashed = hashlib.sha256(b"millstream.encoder")
    for part in _parts(model_path, kind):
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.digest()


def _parts(model_path: Path, kind: str) -> Iterator[bytes]:
    yield kind.encode()
    for name in _SETTINGS:
        file = model_path / name
        yield name.encode()
        yield file.read_bytes() if file.is_file() else b""
    for file in sorted(model_path.glob("*.safetensors")):
        yield file.name.encode()
        yield file.stat().st_size.to_bytes(8, "big")
        with file.open("rb") as opened:
            yield from _weights(opened)


def _weights(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a safetensors file's header and samples; the format is documented by safetensors."""
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a safetensors header of {length} bytes")
    header = file.read(length)
    yield header
    tensors: dict[str, Any] = json.loads(header)
    for name in sorted(tensors):
        if any(part in name for part in _TOWER_NAMES):
            start, end = tensors[name]["data_offsets"]
            file.seek(8 + length + start)
            yield file.read(min(_SAMPLE_BYTES, end - start))
