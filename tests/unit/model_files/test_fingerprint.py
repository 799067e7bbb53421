"""What tells models apart without reading their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream_server.model_files.weights import fingerprint, weight_files


def _tensors(path: Path, name: str, values: bytes) -> None:
    header = {name: {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    _tensors(folder / "a.safetensors", "x", b"1234")
    _tensors(folder / "b.safetensors", "y", b"1234")
    return folder


def test_a_copy_has_the_same(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    (copy / "README.md").write_text("of no matter")
    assert fingerprint(copy) == fingerprint(model)
    assert len(fingerprint(model)) == 64


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text('{"a": 1}'),
        lambda folder: (folder / "b.safetensors").unlink(),
        lambda folder: (folder / "b.safetensors").rename(folder / "c.safetensors"),
        lambda folder: _tensors(folder / "b.safetensors", "z", b"1234"),
        lambda folder: _tensors(folder / "b.safetensors", "y", b"12345"),
    ],
    ids=["config", "file gone", "file renamed", "tensor renamed", "tensor grown"],
)
def test_another_model_has_another(model: Path, change: Callable[[Path], object]) -> None:
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) not in {before, ""}


def test_unusable_files_have_none(model: Path, tmp_path: Path) -> None:
    (model / "b.safetensors").write_bytes(b"\xff" * 100)
    assert not fingerprint(model)
    assert not fingerprint(tmp_path / "nowhere")


def test_which_files_are_weights(model: Path) -> None:
    names = [file.name for file in weight_files(model)]
    assert names == ["a.safetensors", "b.safetensors"]
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"y": "b.safetensors"}}))
    assert [file.name for file in weight_files(model)] == ["b.safetensors"]
    index.write_text("not JSON")
    assert [file.name for file in weight_files(model)] == names
    for name in names:
        (model / name).rename((model / name).with_suffix(".bin"))
    assert [file.name for file in weight_files(model)] == ["a.bin", "b.bin"]
