"""The transformers adapter: encoders of images and videos, and models that embed or rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from millstream_server.embedding.embedder import Embedder
from millstream_server.encode.encoder import MediaEncoder
from millstream_server.engines.adapter import (
    Adapter,
    EncoderSettings,
    EngineContext,
    Offer,
    VectorEngineSettings,
    model_folder,
)
from millstream_server.media import families
from millstream_server.media.families.family import Family
from millstream_server.model_files.state import expect_weights
from millstream_server.runtime.settings import SettingsError

if TYPE_CHECKING:
    from millstream_server.engines.transformers.tower import TowerConfig


def family_of(model_path: Path) -> Family:
    """Return the family of a model that reads images.

    Raises:
        SettingsError: it reads none, or is of a kind that isn't supported.
    """
    try:
        family = families.load(model_path)
    except families.UnusableFamilyError as error:
        raise SettingsError(f"--model-path: {error}") from error
    if family is None:
        raise SettingsError(f"--model-path {model_path}: the model reads text only")
    return family


def tower_config(context: EngineContext) -> TowerConfig:
    """Make the configuration of an encoder with any tower.

    Raises:
        SettingsError: there is no model that reads images, or its files aren't complete.
    """
    from millstream_server.engines.transformers.tower import TowerConfig  # noqa: PLC0415

    if context.model_path is None:
        raise SettingsError("--model-path is required, except with --engine simulated")
    expect_weights(context.model_path)
    family_of(context.model_path)
    return TowerConfig(model_path=context.model_path, **dataclasses.asdict(context.common))


def _encoder(_own: None, context: EngineContext) -> MediaEncoder:
    from millstream_server.engines.transformers.encoder import TowerEncoder  # noqa: PLC0415
    from millstream_server.engines.transformers.tower import TransformersTower  # noqa: PLC0415

    config = tower_config(context)
    return TowerEncoder(config, TransformersTower(config))


def pixels(model_path: Path) -> MediaEncoder:
    """Make an encoder without a tower, for an engine that has one itself; start it after that.

    Raises:
        SettingsError: the model reads no images.
    """
    from millstream_server.engines.transformers.encoder import TowerEncoder  # noqa: PLC0415
    from millstream_server.engines.transformers.tower import NoTower  # noqa: PLC0415

    context = EngineContext(common=EncoderSettings(), model_path=model_path, model_name="")
    config = tower_config(context)
    return TowerEncoder(config, NoTower(config))


def _embedder(_own: None, context: EngineContext) -> Embedder:
    from millstream_server.engines.transformers.embedder import TransformersEmbedder  # noqa: PLC0415
    from millstream_server.engines.transformers.vector_model import VectorModelConfig  # noqa: PLC0415

    common: VectorEngineSettings = context.common
    return TransformersEmbedder(
        VectorModelConfig(
            model_path=model_folder(
                context.model_path, "transformers", "a model directory", "config.json"
            ),
            device=common.device,
            dimensions=common.cuts,
            answers=common.rank_answers,
            context_length=common.context_length,
            max_running_requests=common.max_running_requests,
            warm_up_timeout_s=common.warm_up_timeout_s,
        )
    )


ADAPTER = Adapter(
    name="transformers",
    packages=("torch", "transformers"),
    encoder=Offer(make=_encoder),
    encodes=lambda _: True,
    embedder=Offer(make=_embedder),
)
