"""The simulated engine's settings, and its configuration made from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from millstream_server.engines.base import Role
from millstream_server.engines.settings import EngineContext
from millstream_server.engines.simulated.config import SimulatedConfig
from millstream_server.engines.simulated.diffuser import SimulatedDiffuserConfig
from millstream_server.engines.simulated.encoder import MIN_WIDTH, SimulatedEncoderConfig
from millstream_server.generation.generator import MediaModel, read_media_model
from millstream_server.media.families import UnusableFamilyError, load
from millstream_server.runtime.settings import SettingsError, setting
from millstream_server.synthesis.request import Kind

_MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """Settings that only the simulated engine reads."""

    simulated_load_s: float = setting(0.0, help="simulated: time to load the model")
    simulated_step_s: float = setting(0.0, help="simulated: time of a decode step")
    simulated_prefill_s_per_token: float = setting(0.0, help="simulated: prefill time per token")
    simulated_vocab_size: int = setting(32000, help="simulated: vocabulary size")
    simulated_dp_size: int = setting(1, help="simulated: data-parallel ranks, 1 to 64")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEncoderSettings:
    """Settings that only the simulated encoder reads."""

    simulated_load_s: float = setting(0.0, help="simulated: time to load the model")
    simulated_family: Literal["qwen2_5_vl", "qwen3_vl", "gemma3"] = setting(
        "qwen2_5_vl", help="simulated: how it cuts images, qwen2_5_vl, qwen3_vl or gemma3"
    )
    simulated_embedding_width: int = setting(8, help="simulated: width of a row, at least 4")
    simulated_item_s: float = setting(0.0, help="simulated: time of the tower per item")
    simulated_patch_s: float = setting(0.0, help="simulated: time of the tower per patch")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDiffuserSettings:
    """Settings that only the simulated engine for images and videos reads."""

    simulated_load_s: float = setting(0.0, help="simulated: time to load the model")
    simulated_step_s: float = setting(0.0, help="simulated: time of a denoising step")


def diffuser_config(settings: SimulatedDiffuserSettings, kind: Kind) -> SimulatedDiffuserConfig:
    """Make the configuration of one engine for images or for videos."""
    return SimulatedDiffuserConfig(
        kinds=frozenset({kind}),
        image_to_image=kind is Kind.IMAGE,
        load_s=settings.simulated_load_s,
        step_s=settings.simulated_step_s,
    )


def encoder_config(
    settings: SimulatedEncoderSettings, max_item_tokens: int, model_path: Path | None
) -> SimulatedEncoderConfig:
    """Make the configuration of one encoder; a model's files decide over family and width.

    Raises:
        SettingsError: the width is too small, or the model takes no images.
    """
    config = SimulatedEncoderConfig(
        family=settings.simulated_family,
        width=settings.simulated_embedding_width,
        max_item_tokens=max_item_tokens,
        load_s=settings.simulated_load_s,
        item_s=settings.simulated_item_s,
        patch_s=settings.simulated_patch_s,
    )
    if model_path is not None:
        config = _like(config, model_path)
    if config.width < MIN_WIDTH:
        raise SettingsError(f"--simulated-embedding-width: {config.width} is below {MIN_WIDTH}")
    return config


def _like(config: SimulatedEncoderConfig, model_path: Path) -> SimulatedEncoderConfig:
    """Take what a model's files say of its images, so that a simulated engine accepts the rows."""
    try:
        family = load(model_path)
    except UnusableFamilyError as error:
        raise SettingsError(f"--model-path: {error}") from error
    if family is None:
        raise SettingsError(f"--model-path {model_path}: the model reads text only")
    return replace(
        config,
        family=family.name,
        width=family.embedding_width,
        image_tokens=family.image_tokens or config.image_tokens,
    )


def engine_config(settings: SimulatedSettings, context: EngineContext) -> SimulatedConfig:
    """Make the configuration of one engine.

    Raises:
        SettingsError: the number of ranks is out of range, or the model's media can't be read.
    """
    common = context.common
    if not 1 <= settings.simulated_dp_size <= _MAX_RANKS:
        sentence = f"must be from 1 to {_MAX_RANKS}, not {settings.simulated_dp_size}"
        raise SettingsError(f"--simulated-dp-size {sentence}")
    config = SimulatedConfig(
        role=context.role,
        vocab_size=settings.simulated_vocab_size,
        dp_size=settings.simulated_dp_size,
        load_s=settings.simulated_load_s,
        step_s=settings.simulated_step_s,
        prefill_s_per_token=settings.simulated_prefill_s_per_token,
        bootstrap_host=common.bootstrap_host,
        bootstrap_port=common.bootstrap_port,
        transfer_timeout_s=common.transfer_timeout_s,
        media=_media(context),
    )
    return replace(
        config,
        context_length=common.context_length or config.context_length,
        max_running_requests=common.max_running_requests or config.max_running_requests,
    )


def _media(context: EngineContext) -> MediaModel | None:
    """Take the media of the model whose files are given, if it takes any."""
    if context.model_path is None or context.role is Role.DIFFUSION:
        return None
    try:
        return read_media_model(context.model_path, takes_pixels=context.role is not Role.DECODE)
    except UnusableFamilyError as error:
        raise SettingsError(f"--model-path: {error}") from error
