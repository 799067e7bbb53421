"""Checkpoints that SGLang's process would die of, or take half of, are refused before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream_server.engines.checkpoint import (
    check_fits,
    read_checkpoint,
    read_through,
)
from millstream_server.runtime.errors import InvalidWeightsError
from tests.support.models.checkpoints import changed, save
from tests.support.models.models import make_random_model

_Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def new(model: Path, tmp_path: Path) -> Path:
    return save(model, tmp_path / "new", changed(model, 1), shards=2)


def _config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _check(new: Path, model: Path) -> None:
    check_fits(read_checkpoint(new), read_checkpoint(model))


def test_other_weights_of_the_same_model_fit(model: Path, new: Path) -> None:
    _config(new, transformers_version="9", dtype="bfloat16", use_cache=False, a_new_key=1)
    _check(new, model)


def test_other_float_types_fit(model: Path, tmp_path: Path) -> None:
    weights: dict[str, Any] = {n: w.astype(np.float16) for n, w in changed(model, 1).items()}
    _check(save(model, tmp_path / "half", weights), model)


def test_it_is_read_to_the_end(new: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = read_checkpoint(new)
    read_through(checkpoint, lambda *numbers: seen.append(numbers), lambda: False)
    assert seen[0] == (0, checkpoint.nbytes)
    assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    assert checkpoint.nbytes == sum(file.stat().st_size for file in new.glob("*.safetensors"))


def test_reading_ends_when_it_is_stopped(new: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = read_checkpoint(new)
    read_through(checkpoint, lambda *numbers: seen.append(numbers), lambda: True)
    assert seen == [(0, checkpoint.nbytes)]


def test_a_tied_output_layer_may_be_stored_or_not(model: Path, tmp_path: Path) -> None:
    weights = changed(model, 1)
    without = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    both = [save(model, tmp_path / "a", weights), save(model, tmp_path / "b", without)]
    for path in both:
        _config(path, tie_word_embeddings=True)
    _check(both[0], both[1])
    _check(both[1], both[0])


def _cut_off(path: Path) -> None:
    file = path / "model-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _prolong(path: Path) -> None:
    with (path / "model-00001.safetensors").open("ab") as file:
        file.write(b"\0")


def _lose(path: Path) -> None:
    (path / "model-00002.safetensors").unlink()


def _spoil_header(path: Path) -> None:
    file = path / "model-00001.safetensors"
    file.write_bytes(file.read_bytes()[:8] + b"x" * (file.stat().st_size - 8))


def _escape(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))


def _promise_more(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    read = json.loads(index.read_text())
    read["weight_map"]["model.more"] = "model-00001.safetensors"
    index.write_text(json.dumps(read))


def _unindexed_twice(path: Path) -> None:
    (path / "model.safetensors.index.json").unlink()
    (path / "again.safetensors").write_bytes((path / "model-00001.safetensors").read_bytes())


def _pickled(path: Path) -> None:
    for file in path.glob("*.safetensors*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _empty(path: Path) -> None:
    for file in path.glob("*.safetensors*"):
        file.unlink()


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (_cut_off, "cut off"),
        (_prolong, "isn't as long as its header says"),
        (_lose, r"lacks 1 of the 2 files.*model-00002"),
        (_spoil_header, "isn't a safetensors file"),
        (_escape, "outside its directory"),
        (_promise_more, "that no file has: model.more"),
        (_unindexed_twice, "twice"),
        (_pickled, "pytorch_model.bin.*safetensors"),
        (_empty, "no \\*.safetensors"),
        (lambda path: (path / "config.json").unlink(), "config.json can't be read"),
        (lambda path: (path / "config.json").write_text("{"), "isn't JSON"),
        (lambda path: _config(path, hidden_size=128), "hidden_size is 128, and 64"),
        (
            lambda path: _config(path, rope_parameters={"rope_theta": 5.0}),
            "rope_parameters.rope_theta is 5.0",
        ),
        (lambda path: _config(path, quantization_config={}), "quantized"),
    ],
)
def test_broken_ones_are_refused(
    model: Path, new: Path, break_it: Callable[[Path], None], why: str
) -> None:
    break_it(new)
    with pytest.raises(InvalidWeightsError, match=why):
        _check(new, model)


def test_a_missing_directory_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidWeightsError, match="no directory"):
        _check(tmp_path / "none", model)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w: w.pop(_Q), f"lacks 1 of the model's 21 tensors: {_Q}"),
        (lambda w: w.update({"model.other": w[_Q]}), "1 tensors that the model doesn't: model.o"),
        (lambda w: w.update({_Q: w[_Q][:32]}), r"shape \[32, 64\]; the model's has \[64, 64\]"),
        (lambda w: w.update({_Q: w[_Q].astype(np.int8)}), "type I8; the model's has F32"),
    ],
)
def test_other_tensors_are_refused(
    model: Path, tmp_path: Path, change: Callable[[Any], object], why: str
) -> None:
    weights = changed(model, 1)
    change(weights)
    with pytest.raises(InvalidWeightsError, match=why):
        _check(save(model, tmp_path / "other", weights), model)
