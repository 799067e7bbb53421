"""Which encoder the settings make, and which models are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream_server.engines.sglang.tower import SglangTower
from millstream_server.engines.transformers.encoder import TowerEncoder
from millstream_server.engines.transformers.pixels import NoTower
from millstream_server.engines.transformers.tower import TowerConfig
from millstream_server.engines.transformers.vision import TransformersTower
from millstream_server.media.items import Content
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.settings import SettingsError
from millstream_server.worker.encoding.settings import EncoderSettings, TowerKind, make_encoder
from tests.support.vision_models import FamilyName, make_vision_model


@pytest.mark.parametrize(
    ("family", "tower", "content", "made"),
    [
        ("qwen2_5_vl", TowerKind.AUTO, Content.ROWS, SglangTower),
        ("qwen3_vl", TowerKind.AUTO, Content.ROWS, SglangTower),
        ("gemma3", TowerKind.AUTO, Content.ROWS, TransformersTower),
        ("qwen3_vl", TowerKind.TRANSFORMERS, Content.ROWS, TransformersTower),
        ("qwen3_vl", TowerKind.SGLANG, Content.ROWS, SglangTower),
        ("gemma3", TowerKind.AUTO, Content.PIXELS, NoTower),
        ("qwen3_vl", TowerKind.AUTO, Content.PIXELS, NoTower),
    ],
)
def test_towers(
    tmp_path: Path, family: FamilyName, tower: TowerKind, content: Content, made: type[object]
) -> None:
    make_vision_model(tmp_path, family)
    encoder = make_encoder(EncoderSettings(tower=tower, device="cpu"), tmp_path, content)
    assert isinstance(encoder, TowerEncoder)
    assert type(encoder._tower) is made


def test_sglang_takes_no_gemma(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "gemma3")
    settings = EncoderSettings(tower=TowerKind.SGLANG, device="cpu")
    with pytest.raises(SettingsError, match=r"--tower sglang: SGLang can't run .* gemma3"):
        make_encoder(settings, tmp_path)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "llama"}, "the model reads text only"),
        ({"model_type": "pixtral", "vision_config": {}}, "'pixtral' are not supported"),
    ],
)
async def test_models_without_images_are_refused(
    tmp_path: Path, config: dict[str, object], sentence: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match=sentence):
        make_encoder(EncoderSettings(), tmp_path)
    tower = TowerConfig(model_path=tmp_path)
    encoder = TowerEncoder(tower, NoTower(tower))
    with pytest.raises(EngineFailedError):
        await encoder.start(lambda _error: None)
    await encoder.close()
