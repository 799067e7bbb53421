from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_server.model_files.weights import (
    BadSafetensorsError,
    StoredTensor,
    read_header,
)


def _write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": _entry("BF16", [2, 3], 4, 16),
        "a": _entry("F32", [], 0, 4),
    }
    path = _write(tmp_path / "m.safetensors", header, bytes(16))
    at = path.stat().st_size - 16
    assert read_header(path) == (
        StoredTensor("a", "F32", (), at, 4),
        StoredTensor("b", "BF16", (2, 3), at + 4, 12),
    )


def test_it_reads_what_the_library_writes(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy", reason="numpy isn't installed")
    library = pytest.importorskip("safetensors.numpy", reason="safetensors isn't installed")
    values = numpy.arange(6, dtype=numpy.float16).reshape(2, 3)
    path = tmp_path / "m.safetensors"
    library.save_file({"w": values}, path, metadata={"format": "pt"})
    (found,) = read_header(path)
    assert (found.name, found.dtype, found.shape) == ("w", "F16", (2, 3))
    assert path.read_bytes()[found.offset : found.offset + found.nbytes] == values.tobytes()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "isn't a safetensors file"),
        (b"PK\x03\x04not a tensor in sight", "isn't a safetensors file"),
        ((40).to_bytes(8, "little") + b"{}", "is cut off: its header ends at byte 48"),
        ((2).to_bytes(8, "little") + b"[]", "its header is no object"),
        ((2).to_bytes(8, "little") + b"{{", "isn't a safetensors file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadSafetensorsError, match=why):
        read_header(path)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (_entry("F32", [2], 0, 8), "is cut off: its tensors end at byte"),
        (_entry("F32", [2], 0, 4), r"has 4 bytes, but F32 of the shape \[2\] has 8"),
        (_entry("F32", [-1], 0, 4), "aren't whole numbers"),
        (_entry("X9", [1], 4, 0), "ends before it begins"),
        ({"dtype": "F32", "shape": [1]}, "lacks dtype, shape or data_offsets"),
        ([1], "lacks dtype, shape or data_offsets"),
    ],
)
def test_wrong_entries_are_named(tmp_path: Path, entry: Any, why: str) -> None:
    path = _write(tmp_path / "m.safetensors", {"w": entry})
    with pytest.raises(BadSafetensorsError, match=why):
        read_header(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadSafetensorsError, match="can't be read: No such file"):
        read_header(tmp_path / "none")
