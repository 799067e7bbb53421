"""Which files of a model are its weights."""

from __future__ import annotations

import json
from pathlib import Path

_INDEX = "model.safetensors.index.json"
_SUFFIXES = (".bin", ".pt", ".pth", ".gguf")


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
