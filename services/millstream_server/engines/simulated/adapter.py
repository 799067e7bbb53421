"""The simulated engines: their settings, and their configurations made from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from millstream_server.encoding.encoder import MediaEncoder
from millstream_server.engines.adapter import (
    Adapter,
    EncoderSettings,
    EngineContext,
    Offer,
    TextEngineSettings,
)
from millstream_server.engines.base import Role
from millstream_server.engines.transformers.adapter import family_of
from millstream_server.generation.generator import GeneratorEngine, MediaModel, read_media_model
from millstream_server.media.families import UnusableFamilyError
from millstream_server.runtime.settings import SettingsError, setting
from millstream_server.synthesis.diffuser import Diffuser
from millstream_server.synthesis.request import Kind
from millstream_server.vectors.embedder import Embedder

_MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """The simulated model and machine."""

    role: Role = Role.AGGREGATED
    vocab_size: int = 32000
    context_length: int = 8192
    block_size: int = 16
    total_blocks: int = 1 << 20
    """KV blocks of each data-parallel rank."""
    max_running_requests: int = 4096
    """Of all ranks together; each has an equal share."""
    dp_size: int = 1
    """Data-parallel ranks, each with its own queue, steps and KV cache."""
    step_s: float = 0.0
    """Seconds per decode step, for any batch size; 0: as fast as possible."""
    prefill_s_per_token: float = 0.0
    """Seconds per prompt token that isn't cached."""
    load_s: float = 0.0
    weight_version: str = ""
    """Version of the weights at the start; it leaves the step between tokens at 1."""
    eos_token_id: int | None = None
    bootstrap_host: str = "127.0.0.1"
    bootstrap_port: int = 0
    transfer_timeout_s: float = 30.0
    prefill_first: bool = False
    """Whether decode starts after prefill, with data from its end, and not at the same time."""
    media: MediaModel | None = None
    """What the model takes besides text; None: nothing."""

    @property
    def max_running_per_rank(self) -> int:
        """Most requests at once on one data-parallel rank."""
        return max(1, self.max_running_requests // self.dp_size)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEmbedderSettings:
    """Settings that only the simulated embedder reads."""

    simulated_load_s: float = setting(0.0, help="simulated: time to load the model")
    simulated_token_s: float = setting(0.0, help="simulated: time of the model per token")
    simulated_width: int = setting(16, help="simulated: numbers of a vector")
    simulated_max_input_tokens: int = setting(512, help="simulated: most tokens of an input")
    simulated_vocab_size: int = setting(32000, help="simulated: vocabulary size")


def _generator(own: SimulatedSettings, context: EngineContext) -> GeneratorEngine:
    from millstream_server.engines.simulated.engine import SimulatedEngine  # noqa: PLC0415

    return SimulatedEngine(engine_config(own, context))


def engine_config(own: SimulatedSettings, context: EngineContext) -> SimulatedConfig:
    """Make the configuration of one engine.

    Raises:
        SettingsError: the number of ranks is out of range, or the model's media can't be read.
    """
    common: TextEngineSettings = context.common
    if not 1 <= own.simulated_dp_size <= _MAX_RANKS:
        sentence = f"must be from 1 to {_MAX_RANKS}, not {own.simulated_dp_size}"
        raise SettingsError(f"--simulated-dp-size {sentence}")
    config = SimulatedConfig(
        role=context.role,
        vocab_size=own.simulated_vocab_size,
        dp_size=own.simulated_dp_size,
        load_s=own.simulated_load_s,
        step_s=own.simulated_step_s,
        prefill_s_per_token=own.simulated_prefill_s_per_token,
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


def _diffuser(own: SimulatedDiffuserSettings, context: EngineContext) -> Diffuser:
    from millstream_server.engines.simulated import diffuser  # noqa: PLC0415

    kind = context.kind or Kind.IMAGE
    config = diffuser.SimulatedDiffuserConfig(
        kinds=frozenset({kind}),
        image_to_image=kind is Kind.IMAGE,
        load_s=own.simulated_load_s,
        step_s=own.simulated_step_s,
    )
    return diffuser.SimulatedDiffuser(config)


def _encoder(own: SimulatedEncoderSettings, context: EngineContext) -> MediaEncoder:
    """Make an encoder; a model's files decide over family and width."""
    from millstream_server.engines.simulated import encoder  # noqa: PLC0415

    common: EncoderSettings = context.common
    config = encoder.SimulatedEncoderConfig(
        family=own.simulated_family,
        width=own.simulated_embedding_width,
        max_item_tokens=common.max_item_tokens,
        load_s=own.simulated_load_s,
        item_s=own.simulated_item_s,
        patch_s=own.simulated_patch_s,
    )
    if context.model_path is not None:
        # So that a simulated engine accepts the rows.
        family = family_of(context.model_path)
        config = replace(
            config,
            family=family.name,
            width=family.embedding_width,
            image_tokens=family.image_tokens or config.image_tokens,
        )
    if config.width < encoder.MIN_WIDTH:
        sentence = f"{config.width} is below {encoder.MIN_WIDTH}"
        raise SettingsError(f"--simulated-embedding-width: {sentence}")
    return encoder.SimulatedEncoder(config)


def _pixels(model_path: Path) -> MediaEncoder:
    context = EngineContext(common=EncoderSettings(), model_path=model_path, model_name="")
    return _encoder(SimulatedEncoderSettings(), context)


def _embedder(own: SimulatedEmbedderSettings, _context: EngineContext) -> Embedder:
    from millstream_server.engines.simulated import vectors  # noqa: PLC0415 - numpy

    halves = (own.simulated_width // 4, own.simulated_width // 2)
    config = vectors.SimulatedEmbedderConfig(
        width=own.simulated_width,
        dimensions=tuple(filter(None, (*halves, own.simulated_width))),
        max_input_tokens=own.simulated_max_input_tokens,
        vocab_size=own.simulated_vocab_size,
        load_s=own.simulated_load_s,
        token_s=own.simulated_token_s,
    )
    return vectors.SimulatedEmbedder(config)


def _suite_flags(service: str, model: Path) -> list[str]:
    """Make its tokens those of the model whose tokenizer writes them out."""
    if service == "encode":
        return ["--engine", "simulated"]
    if service not in {"prefill", "decode"}:
        return []
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        size = int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{model}/config.json has no usable vocab_size") from error
    return ["--simulated-vocab-size", str(size)]


_TEXT: Offer[GeneratorEngine] = Offer(settings=SimulatedSettings, make=_generator)

ADAPTER = Adapter(
    name="simulated",
    generator=_TEXT,
    text_diffuser=_TEXT,
    encoder=Offer(settings=SimulatedEncoderSettings, make=_encoder),
    pixels=_pixels,
    diffuser=Offer(settings=SimulatedDiffuserSettings, make=_diffuser),
    embedder=Offer(settings=SimulatedEmbedderSettings, make=_embedder),
    suite_flags=_suite_flags,
)
