"""Makes the encoder of images and videos from the settings."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millstream_server.encoding.encoder import MediaEncoder
from millstream_server.engines.sglang import cpu as sglang_cpu
from millstream_server.engines.sglang import tower as sglang
from millstream_server.engines.transformers.encoder import TowerEncoder
from millstream_server.engines.transformers.pixels import NoTower
from millstream_server.engines.transformers.tower import TowerConfig
from millstream_server.engines.transformers.vision import TransformersTower
from millstream_server.media import families
from millstream_server.media.items import Content
from millstream_server.model_files.state import expect_weights
from millstream_server.runtime.settings import SettingsError, setting


class TowerKind(enum.Enum):
    """Whose vision tower encodes."""

    AUTO = "auto"
    """SGLang's where it can run the model's tower apart from an engine (the Qwen families), as
    engines of SGLang then get the rows that they would make themselves; else that of transformers.
    """
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"
    SIMULATED = "simulated"
    """No tower and no model: `engines.simulated.encoder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """Settings of an encoder."""

    tower: TowerKind = setting(
        TowerKind.AUTO,
        help="whose vision tower runs: sglang, transformers, simulated, or auto: sglang for the "
        "families that it encodes (Qwen2.5-VL, Qwen3-VL), else transformers",
    )
    device: Literal["auto", "cuda", "cpu"] = setting("auto", help="auto, cuda or cpu")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        help="type of the tower and its embeddings; auto: bfloat16 on a GPU, float32 on a CPU",
    )
    max_item_tokens: int = setting(
        16384, help="most tokens of an image or a video; a larger one is refused"
    )
    warm_up_timeout_s: float = setting(120.0, help="longest warm-up before the start fails")


def make_encoder(
    settings: EncoderSettings, model_path: Path, content: Content = Content.ROWS
) -> MediaEncoder:
    """Make the encoder that ``settings`` name; nothing is loaded yet.

    With `Content.PIXELS` no tower runs: for the worker whose engine has the tower. Start such an
    encoder after the engine.

    Raises:
        SettingsError: the model reads no images, or the tower can't run its family.
    """
    expect_weights(model_path)
    try:
        family = families.load(model_path)
    except families.UnusableFamilyError as error:
        raise SettingsError(f"--model-path: {error}") from error
    if family is None:
        raise SettingsError(f"--model-path {model_path}: the model reads text only")
    if not sglang_cpu.gpu_present():
        sglang_cpu.activate()  # for torchvision too, which the image processors import
    config = TowerConfig(
        model_path=model_path,
        device=settings.device,
        dtype=settings.dtype,
        max_item_tokens=settings.max_item_tokens,
        warm_up_timeout_s=settings.warm_up_timeout_s,
    )
    if content is Content.PIXELS:
        return TowerEncoder(config, NoTower(config))
    kind = settings.tower
    if kind is TowerKind.AUTO:
        kind = TowerKind.SGLANG if sglang.supports(family) else TowerKind.TRANSFORMERS
    if kind is TowerKind.TRANSFORMERS:
        return TowerEncoder(config, TransformersTower(config))
    tower = sglang.SglangTower(config)
    problem = tower.supports(family)
    if problem is not None:
        raise SettingsError(f"--tower {kind.value}: {problem}")
    return TowerEncoder(config, tower)
