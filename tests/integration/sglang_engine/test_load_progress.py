"""What a worker says while SGLang loads a model of some size."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from millstream_server.control.engine import LoadStage
from tests.support.engines.sglang_requests import child
from tests.support.models.models import make_random_model

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]

_LAYERS, _HIDDEN, _FEED_FORWARD, _VOCAB = 6, 1024, 4096, 1024
_LAYER = {
    "input_layernorm": (_HIDDEN,),
    "self_attn.q_proj": (_HIDDEN, _HIDDEN),
    "self_attn.k_proj": (_HIDDEN // 2, _HIDDEN),
    "self_attn.v_proj": (_HIDDEN // 2, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HIDDEN),
    "post_attention_layernorm": (_HIDDEN,),
    "mlp.gate_proj": (_FEED_FORWARD, _HIDDEN),
    "mlp.up_proj": (_FEED_FORWARD, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _FEED_FORWARD),
}


def _write(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of zeros, which takes no place on the disk."""
    at, header = 0, {}
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + at)


def _make_big(folder: Path) -> Path:
    """Make a model of 360 MB in seven files, and one file that isn't its own."""
    make_random_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": _HIDDEN,
        "intermediate_size": _FEED_FORWARD,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    matrix = (_VOCAB, _HIDDEN)
    ends = {"model.embed_tokens": matrix, "model.norm": (_HIDDEN,), "lm_head": matrix}
    files = {"model-00000.safetensors": ends} | {
        f"model-{n + 1:05}.safetensors": {f"model.layers.{n}.{k}": v for k, v in _LAYER.items()}
        for n in range(_LAYERS)
    }
    index: dict[str, str] = {}
    for name, shapes in files.items():
        named = {f"{tensor}.weight": shape for tensor, shape in shapes.items()}
        _write(folder / name, named)
        index |= dict.fromkeys(named, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


async def test_files_and_bytes_grow_while_a_model_loads(tmp_path: Path) -> None:
    model = _make_big(tmp_path / "big")
    said = await child("tests.support.engines.loading_watch", str(model))
    total = sum(file.stat().st_size for file in model.glob("model-*.safetensors"))
    assert total > 350 << 20
    assert {(each["files_total"], each["bytes_total"]) for each in said} == {(_LAYERS + 1, total)}
    assert said[0]["stage"] == LoadStage.STARTING
    loading = [each for each in said if each["stage"] == LoadStage.LOADING_WEIGHTS]
    counts = [each["bytes_done"] for each in loading]
    assert any(0 < count < total for count in counts)
    assert len({count * 10 // total for count in counts}) >= 3, "it was seen growing"
    assert said[-1]["stage"] == LoadStage.PREPARING
    assert (said[-1]["files_done"], said[-1]["bytes_done"]) == (_LAYERS + 1, total)
    stages = [each["stage"] for each in said]
    assert stages == sorted(stages)
