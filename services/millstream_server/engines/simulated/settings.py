"""The simulated engine's settings, and its configuration made from them."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from millstream_server.engines.base import Role
from millstream_server.engines.settings import EngineContext
from millstream_server.engines.simulated.config import SimulatedConfig
from millstream_server.engines.simulated.diffuser import SimulatedDiffuserConfig
from millstream_server.engines.simulated.encoder import MIN_WIDTH, SimulatedEncoderConfig
from millstream_server.generation.generator import MediaModel
from millstream_server.generation.media_model import read_media_model
from millstream_server.media.families import UnusableFamilyError, load
from millstream_server.runtime.settings import EngineArguments, SettingsError, declared, setting
from millstream_server.runtime.settings.arguments import ArgumentList, read_arguments
from millstream_server.runtime.settings.declare import flag, from_text
from millstream_server.synthesis.request import Kind

_MAX_RANKS = 64
_VOCAB_SIZE = 32000


# Each of the following classes has the arguments of one simulated engine; see `read_simulated`.


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """Arguments of the engine for text."""

    load_s: float = setting(0.0, help="time to load the model")
    step_s: float = setting(0.0, help="time of a decode step")
    prefill_s_per_token: float = setting(0.0, help="prefill time per token")
    vocab_size: int = setting(0, help="vocabulary size; 0: the model's, or 32000")
    dp_size: int = setting(1, help="data-parallel ranks, 1 to 64")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEncoderSettings:
    """Arguments of the encoder."""

    load_s: float = setting(0.0, help="time to load the model")
    family: Literal["qwen2_5_vl", "qwen3_vl", "gemma3"] = setting(
        "qwen2_5_vl", help="how it cuts images, qwen2_5_vl, qwen3_vl or gemma3"
    )
    embedding_width: int = setting(8, help="width of a row, at least 4")
    item_s: float = setting(0.0, help="time of the tower per item")
    patch_s: float = setting(0.0, help="time of the tower per patch")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDiffuserSettings:
    """Arguments of the engine for images and videos."""

    load_s: float = setting(0.0, help="time to load the model")
    step_s: float = setting(0.0, help="time of a denoising step")


def read_simulated(cls: type[Any], given: EngineArguments) -> EngineArguments:
    """Return the arguments with what was read: ``cls`` takes their values.

    Raises:
        SettingsError: one is unknown or wrong.
    """

    def add_to(parser: argparse.ArgumentParser) -> Mapping[str, str]:
        hints = typing.get_type_hints(cls)
        for f in declared(cls):
            kind = partial(from_text, kind=hints[f.name], source=flag(f.name))
            parser.add_argument(flag(f.name), type=kind)
        return {}

    known = ArgumentList(engine="The simulated engine", managed={}, add_to=add_to)
    return read_arguments(given, known)


def gone(cls: type[Any]) -> dict[str, str]:
    """Return the settings that the arguments of ``cls`` were once: what to write instead."""
    return {
        f"simulated_{f.name}": f"give the simulated engine's own argument: -- {flag(f.name)} VALUE"
        for f in declared(cls)
    }


def diffuser_config(settings: SimulatedDiffuserSettings, kind: Kind) -> SimulatedDiffuserConfig:
    """Make the configuration of one engine for images or for videos."""
    return SimulatedDiffuserConfig(
        kinds=frozenset({kind}),
        image_to_image=kind is Kind.IMAGE,
        load_s=settings.load_s,
        step_s=settings.step_s,
    )


def encoder_config(
    settings: SimulatedEncoderSettings, max_item_tokens: int, model_path: Path | None
) -> SimulatedEncoderConfig:
    """Make the configuration of one encoder; a model's files decide over family and width.

    Raises:
        SettingsError: the width is too small, or the model takes no images.
    """
    config = SimulatedEncoderConfig(
        family=settings.family,
        width=settings.embedding_width,
        max_item_tokens=max_item_tokens,
        load_s=settings.load_s,
        item_s=settings.item_s,
        patch_s=settings.patch_s,
    )
    if model_path is not None:
        config = _like(config, model_path)
    if config.width < MIN_WIDTH:
        raise SettingsError(f"-- --embedding-width: {config.width} is below {MIN_WIDTH}")
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
    if not 1 <= settings.dp_size <= _MAX_RANKS:
        sentence = f"must be from 1 to {_MAX_RANKS}, not {settings.dp_size}"
        raise SettingsError(f"-- --dp-size {sentence}")
    config = SimulatedConfig(
        role=context.role,
        vocab_size=settings.vocab_size or _vocab_size(context.model_path),
        dp_size=settings.dp_size,
        load_s=settings.load_s,
        step_s=settings.step_s,
        prefill_s_per_token=settings.prefill_s_per_token,
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


def _vocab_size(model_path: Path | None) -> int:
    """Return a model's: simulated tokens must be tokens that its tokenizer turns into text."""
    if model_path is None or not (model_path / "config.json").is_file():
        return _VOCAB_SIZE
    try:
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        return int((config.get("text_config") or config)["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(
            f"--model-path {model_path}: config.json has no usable vocab_size; give -- --vocab-size"
        ) from error


def _media(context: EngineContext) -> MediaModel | None:
    """Take the media of the model whose files are given, if it takes any."""
    if context.model_path is None or context.role is Role.DIFFUSION:
        return None
    try:
        return read_media_model(context.model_path, takes_pixels=context.role is not Role.DECODE)
    except UnusableFamilyError as error:
        raise SettingsError(f"--model-path: {error}") from error
