"""What makes two embeddings of one picture differ is in the digest; nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from millstream_server.engines.transformers.encoder import settings_digest
from tests.support.models.vision_models import make_vision_model


def _train(directory: Path, name: str) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights[name] = weights[name] * 2
    save_file(weights, file, metadata={"format": "pt"})


def _append(directory: Path, name: str) -> None:
    file = directory / name
    file.write_text(file.read_text() + " ")


_SAME: dict[str, Callable[[Path], None]] = {
    "nothing": lambda _directory: None,
    "language model": lambda directory: _train(directory, "model.norm.weight"),
    "tokenizer": lambda directory: _append(directory, "tokenizer_config.json"),
}
_OTHER: dict[str, Callable[[Path], None]] = {
    "tower": lambda directory: _train(directory, "visual.merger.ln_q.weight"),
    "image processor": lambda directory: _append(directory, "preprocessor_config.json"),
    "video processor": lambda directory: _append(directory, "video_preprocessor_config.json"),
    "config": lambda directory: _append(directory, "config.json"),
}


@pytest.mark.parametrize("change", [*_SAME, *_OTHER])
def test_changes(tmp_path: Path, change: str) -> None:
    make_vision_model(tmp_path, "qwen2_5_vl")
    before = settings_digest(tmp_path, "kind")
    {**_SAME, **_OTHER}[change](tmp_path)
    assert (settings_digest(tmp_path, "kind") != before) is (change in _OTHER)
    assert len(before) == 32


def test_the_encoders_kind_counts(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "gemma3")
    assert settings_digest(tmp_path, "a") != settings_digest(tmp_path, "b")
