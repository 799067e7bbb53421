"""The simulated engines: their settings, and their configurations made from them."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from millstream_server.control.engine import Role
from millstream_server.diffusion.diffuser import Diffuser
from millstream_server.diffusion.request import Kind
from millstream_server.embedding.embedder import Embedder
from millstream_server.encode.encoder import MediaEncoder
from millstream_server.engines.adapter import (
    Adapter,
    EncoderSettings,
    EngineContext,
    Offer,
    ServedEngineSettings,
    TextEngineSettings,
)
from millstream_server.engines.transformers.adapter import family_of
from millstream_server.generation.generator import GeneratorEngine, MediaModel, read_media_model
from millstream_server.media.families import UnusableFamilyError
from millstream_server.runtime.settings import EngineArguments, SettingsError, declared, setting
from millstream_server.runtime.settings.arguments import ArgumentList, read_arguments
from millstream_server.runtime.settings.declare import flag, from_text

if TYPE_CHECKING:
    from millstream_server.engines.simulated.speech import Speech

_MAX_RANKS = 64
_VOCAB_SIZE = 32000
EngineT = TypeVar("EngineT")


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
    speech: Speech | None = None
    """What it says; None: it counts on from a prompt's last token."""
    bootstrap_host: str = "127.0.0.1"
    bootstrap_port: int = 0
    handoff_wait_s: float = 300.0
    """Of each leg for the other; the transfer itself takes no time."""
    prefill_first: bool = False
    """Whether decode starts after prefill, with data from its end, and not at the same time."""
    media: MediaModel | None = None
    """What the model takes besides text; None: nothing."""

    @property
    def max_running_per_rank(self) -> int:
        return max(1, self.max_running_requests // self.dp_size)


# Each of the following classes has the arguments of one simulated engine; see `read_simulated`.


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """Arguments of the engine for text."""

    load_s: float = setting(0.0, help="time to load the model")
    step_s: float = setting(0.0, help="time of a decode step")
    prefill_s_per_token: float = setting(0.0, help="prefill time per token")
    vocab_size: int = setting(
        0, help="count in a vocabulary of this size; 0: speak, in the tokens of the model, if given"
    )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEmbedderSettings:
    """Arguments of the embedder."""

    load_s: float = setting(0.0, help="time to load the model")
    token_s: float = setting(0.0, help="time of the model per token")
    width: int = setting(16, help="numbers of a vector")
    max_input_tokens: int = setting(512, help="most tokens of an input")
    vocab_size: int = setting(_VOCAB_SIZE, help="vocabulary size")


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


def _generator(own: SimulatedSettings, context: EngineContext) -> GeneratorEngine:
    from millstream_server.engines.simulated.engine import SimulatedEngine  # noqa: PLC0415

    return SimulatedEngine(engine_config(own, context))


def engine_config(own: SimulatedSettings, context: EngineContext) -> SimulatedConfig:
    """Make the configuration of one engine.

    Raises:
        SettingsError: the number of ranks is out of range, or the model's files can't be read.
    """
    common: TextEngineSettings = context.common
    if not 1 <= own.dp_size <= _MAX_RANKS:
        raise SettingsError(f"-- --dp-size must be from 1 to {_MAX_RANKS}, not {own.dp_size}")
    speech = None if own.vocab_size else _speech(context.model_path)
    config = SimulatedConfig(
        role=context.role,
        vocab_size=own.vocab_size or _vocab_size(context.model_path),
        dp_size=own.dp_size,
        load_s=own.load_s,
        step_s=own.step_s,
        prefill_s_per_token=own.prefill_s_per_token,
        bootstrap_host=common.bootstrap_host,
        bootstrap_port=common.bootstrap_port,
        handoff_wait_s=common.handoff_wait_s,
        media=_media(context),
        speech=speech,
        eos_token_id=speech.end if speech else None,
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


def _speech(model_path: Path | None) -> Speech | None:
    from millstream_server.engines.simulated.speech import Speech  # noqa: PLC0415 - tokenizers

    return Speech.load(model_path) if model_path else None


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
        load_s=own.load_s,
        step_s=own.step_s,
    )
    return diffuser.SimulatedDiffuser(config)


def _encoder(own: SimulatedEncoderSettings, context: EngineContext) -> MediaEncoder:
    """Make an encoder; a model's files decide over family and width."""
    from millstream_server.engines.simulated import encoder  # noqa: PLC0415

    common: EncoderSettings = context.common
    config = encoder.SimulatedEncoderConfig(
        family=own.family,
        width=own.embedding_width,
        max_item_tokens=common.max_item_tokens,
        load_s=own.load_s,
        item_s=own.item_s,
        patch_s=own.patch_s,
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
        raise SettingsError(f"-- --embedding-width: {sentence}")
    return encoder.SimulatedEncoder(config)


def _pixels(model_path: Path) -> MediaEncoder:
    context = EngineContext(common=EncoderSettings(), model_path=model_path, model_name="")
    return _encoder(SimulatedEncoderSettings(), context)


def _embedder(own: SimulatedEmbedderSettings, context: EngineContext) -> Embedder:
    from millstream_server.engines.simulated import vectors  # noqa: PLC0415 - numpy

    halves = (own.width // 4, own.width // 2)
    config = vectors.SimulatedEmbedderConfig(
        width=own.width,
        dimensions=tuple(context.common.cuts) or tuple(filter(None, (*halves, own.width))),
        max_input_tokens=own.max_input_tokens,
        vocab_size=own.vocab_size,
        load_s=own.load_s,
        token_s=own.token_s,
        answers=bool(context.common.rank_answers),
    )
    return vectors.SimulatedEmbedder(config)


def _suite_flags(service: str, _model: Path) -> list[str]:
    return ["--engine", "simulated"] if service == "encode" else []


def _offer(arguments: type[Any], make: Callable[[Any, EngineContext], EngineT]) -> Offer[EngineT]:
    """Return an offer of an engine whose own arguments a class has: ``make`` takes their values."""

    def read(_own: None, common: ServedEngineSettings) -> EngineArguments:
        return read_simulated(arguments, common.engine_args)

    def made(_own: None, context: EngineContext) -> EngineT:
        return make(arguments(**context.common.engine_args.values), context)

    return Offer(make=made, read_arguments=read)


_TEXT = _offer(SimulatedSettings, _generator)

ADAPTER = Adapter(
    name="simulated",
    generator=_TEXT,
    text_diffuser=_TEXT,
    encoder=_offer(SimulatedEncoderSettings, _encoder),
    pixels=_pixels,
    diffuser=_offer(SimulatedDiffuserSettings, _diffuser),
    embedder=_offer(SimulatedEmbedderSettings, _embedder),
    suite_flags=_suite_flags,
)
