"""How states become vectors, worked out by hand; and what of a model's files can't be done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_server.embedding.model_files import ModelUse, Module
from millstream_server.engines.transformers.pooling import Place, pooling
from millstream_server.runtime.errors import EngineFailedError
from tests.support.models.vector_models import write_modules

PLACE = Place(torch, "cpu", torch.float32)
STATES = torch.tensor([[[1.0, 5.0], [3.0, 1.0], [9.0, 9.0]]])
MASK = torch.tensor([[1, 1, 0]])


@pytest.mark.parametrize(
    ("way", "vector"),
    [
        ("cls", [1, 5]),
        ("lasttoken", [3, 1]),
        ("mean", [2, 3]),
        ("max", [3, 5]),
        ("mean_sqrt_len_tokens", [4 / 2**0.5, 6 / 2**0.5]),
        ("weightedmean", [7 / 3, 7 / 3]),
        ("cls+mean", [1, 5, 2, 3]),
    ],
)
def test_a_way_reads_no_padding(way: str, vector: list[float], tmp_path: Path) -> None:
    finish, width = pooling(tmp_path, ModelUse(pooling=way), "BertModel", 2, PLACE)
    assert width == len(vector)
    assert finish(STATES, MASK)[0].tolist() == pytest.approx(vector)


def test_what_is_usual_follows_from_the_class(tmp_path: Path) -> None:
    for named, vector in (("Qwen3ForCausalLM", [3, 1]), ("BertModel", [1, 5])):
        finish, _ = pooling(tmp_path, ModelUse(), named, 2, PLACE)
        assert finish(STATES, MASK)[0].tolist() == vector


def test_only_a_last_normalize_is_left_to_the_worker(tmp_path: Path) -> None:
    listed = [Module("Normalize", ""), Module("Dropout", ""), Module("Normalize", "")]
    finish, _ = pooling(tmp_path, ModelUse(pooling="cls", modules=listed), "BertModel", 2, PLACE)
    assert finish(STATES, MASK)[0].norm().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("named", "use", "sentence"),
    [
        ("Qwen3Model", ModelUse(), "no 1_Pooling/config.json says"),
        ("BertModel", ModelUse(pooling="attention"), "pooled as 'attention'"),
        ("BertModel", ModelUse(modules=[Module("LSTM", "")]), "a layer LSTM"),
        ("BertModel", ModelUse(modules=[Module("Dense", "1_Dense")]), "the activation Softmax"),
        ("BertModel", ModelUse(modules=[Module("Dense", "none")]), "none can't be read"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, named: str, use: ModelUse, sentence: str
) -> None:
    write_modules(tmp_path, Dense={"activation_function": "torch.nn.Softmax"})
    tensors: dict[str, Any] = {"linear.weight": torch.zeros(2, 2)}
    from safetensors.torch import save_file  # noqa: PLC0415 - behind torch

    save_file(tensors, tmp_path / "1_Dense" / "model.safetensors")
    with pytest.raises(EngineFailedError, match=sentence):
        pooling(tmp_path, use, named, 2, PLACE)
