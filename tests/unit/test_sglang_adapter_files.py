"""LoRA adapters that SGLang's process would die of, or take half of, are refused before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream_server.control.operations import LoraAdapter
from millstream_server.engines.checkpoint import Checkpoint, read_checkpoint
from millstream_server.engines.sglang.config import LORA_MODULES
from millstream_server.engines.sglang.control.adapters import AdapterLimits, check_adapter
from millstream_server.runtime.errors import InvalidWeightsError
from tests.support.models.checkpoints import make_adapter
from tests.support.models.models import make_random_model

_LIMITS = AdapterLimits(max_rank=8, modules=LORA_MODULES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(model: Path) -> Checkpoint:
    return read_checkpoint(model)


@pytest.mark.parametrize("modules", [("q_proj", "v_proj"), ("gate_proj",), LORA_MODULES])
def test_adapters_fit(
    model: Path, loaded: Checkpoint, tmp_path: Path, modules: tuple[str, ...]
) -> None:
    path, _ = make_adapter(model, tmp_path / "a", seed=1, rank=8, modules=modules)
    assert check_adapter("a", path, loaded, _LIMITS) == LoraAdapter("a", 8, path)


def test_the_models_layers_may_have_another_prefix(
    model: Path, loaded: Checkpoint, tmp_path: Path
) -> None:
    path, _ = make_adapter(model, tmp_path / "a", seed=1)
    tensors = {f"language_{name}": tensor for name, tensor in loaded.tensors.items()}
    tensors |= {f"vision_{name}": tensor for name, tensor in loaded.tensors.items()}
    other = Checkpoint(loaded.path, tensors, loaded.config, loaded.files)
    assert check_adapter("a", path, other, _LIMITS).rank == 4


def _set(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def _tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        from safetensors.numpy import load_file, save_file  # noqa: PLC0415

        file = path / "adapter_model.safetensors"
        tensors = dict(load_file(file))
        change(tensors)
        save_file(tensors, file)

    return rewrite


def _drop(words: str) -> Callable[[Path], None]:
    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if words in name]:
            del tensors[name]

    return _tensors(drop)


def _cut_off(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def _rename(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda path: (path / "adapter_config.json").unlink(), "can't be read"),
        (lambda path: (path / "adapter_config.json").write_text("["), "isn't JSON"),
        (_set(peft_type="IA3"), "peft_type must be LORA"),
        (_set(r=9), "rank 9; this worker takes up to 8 .--max-lora-rank"),
        (_set(r=0), "r is 0"),
        (_set(r=2), r"shape \[4, 64\]; .* \[2, 64\]"),
        (_set(lora_alpha=None), "lora_alpha is None"),
        (_set(target_modules=".*proj"), "list of names"),
        (_set(target_modules=["q_proj", "lm_head"]), "'lm_head'.*--lora-target-modules"),
        (_set(use_dora=True), "DoRA"),
        (_set(use_rslora=True), "rank-stabilized"),
        (_set(rank_pattern={"q_proj": 2}), "different ranks"),
        (_set(alpha_pattern={"q_proj": 2}), "different scalings"),
        (_set(modules_to_save=["lm_head"]), "whole modules"),
        (_set(bias="all"), "biases"),
        (lambda path: (path / "added_tokens.json").write_text("{}"), "adds tokens"),
        (_cut_off, "cut off"),
        (_rename, "Other formats can run code"),
        (lambda path: (path / "more.safetensors").write_bytes(b""), "a file too many: more"),
        (_drop("layers"), "has no tensors"),
        (_drop("v_proj"), "but not 'v_proj' beside it"),
        (_drop("layers.1.self_attn.v_proj.lora_B"), "only one of the two matrices"),
        (_tensors(lambda t: t.update({_A: t[_A][:, :32].copy()})), r"shape \[4, 32\]"),
        (_tensors(lambda t: t.update({_A: t[_A].astype("int8")})), "type I8"),
        (_tensors(lambda t: t.update({"x": t[_A]})), "'x' is no part of a LoRA adapter"),
        (
            _tensors(lambda t: t.update({_A.replace("layers.0", "layers.7"): t.pop(_A)})),
            "layers.7.self_attn.q_proj', which the model doesn't have",
        ),
        (
            _tensors(lambda t: t.update({_A.replace("q_proj", "gate"): t[_A]})),
            "changes 'model.layers.0.self_attn.gate'; this worker takes",
        ),
    ],
)
def test_broken_ones_are_refused(
    model: Path, loaded: Checkpoint, tmp_path: Path, break_it: Callable[[Path], None], why: str
) -> None:
    path, _ = make_adapter(model, tmp_path / "a", seed=1)
    break_it(path)
    with pytest.raises(InvalidWeightsError, match=why):
        check_adapter("a", path, loaded, _LIMITS)


def test_k_proj_alone_is_refused(model: Path, loaded: Checkpoint, tmp_path: Path) -> None:
    path, _ = make_adapter(model, tmp_path / "a", seed=1, modules=("k_proj",))
    with pytest.raises(InvalidWeightsError, match="but not 'q_proj' beside it"):
        check_adapter("a", path, loaded, _LIMITS)
