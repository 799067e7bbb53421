"""The vLLM adapter: its settings, and its engines made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millstream_server.embedding.embedder import Embedder
from millstream_server.engines.adapter import (
    Adapter,
    EngineContext,
    Offer,
    OwnEnvironment,
    TextEngineSettings,
    VectorEngineSettings,
)
from millstream_server.engines.config import of_settings
from millstream_server.engines.transformers import adapter as transformers
from millstream_server.engines.vllm import arguments
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.generation.generator import GeneratorEngine
from millstream_server.runtime.settings import EngineArguments, SettingsError, setting
from millstream_server.runtime.settings.arguments import read_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings that only vLLM reads, to generate text."""

    kv_connector: Literal["push", "pull"] = setting(
        "push",
        help="vllm: how the KV cache gets from prefill to decode. push: prefill writes it while "
        "both legs run; pull: decode starts after prefill and reads it. The same in all workers",
    )


def _read_for_text(_own: VllmSettings, common: TextEngineSettings) -> EngineArguments:
    if common.max_loras_per_batch < 0:
        raise SettingsError(f"--max-loras-per-batch is {common.max_loras_per_batch}, not 0 or up")
    known = arguments.engine_arguments(common.device, arguments.GENERATION)
    read = read_arguments(common.engine_args, known)
    values = read.values
    if "max_lora_rank" in values and not common.max_loras_per_batch:
        raise SettingsError("-- --max-lora-rank needs --max-loras-per-batch")
    if common.max_loras_per_batch and values.get("data_parallel_size", 1) != 1:
        raise SettingsError(
            "--max-loras-per-batch: adapters are loaded into one rank only with "
            "--data-parallel-size; start more workers instead"
        )
    return read


def engine_config(own: VllmSettings, context: EngineContext) -> VllmEngineConfig:
    """Make the configuration of one engine.

    Raises:
        SettingsError: the settings contradict each other.
    """
    given = dict(context.common.engine_args.values)
    return VllmEngineConfig(
        connector=own.kv_connector,
        metrics=context.metrics,
        **of_settings(context, "vllm", given),
    )


def _read_for_vectors(_own: None, common: VectorEngineSettings) -> EngineArguments:
    known = arguments.engine_arguments(common.device, arguments.VECTORS)
    read = read_arguments(common.engine_args, known)
    if read.values.get("data_parallel_size", 1) != 1:
        raise SettingsError("-- --data-parallel-size: run an embedding worker per rank instead")
    return read


def _embedder(_own: None, context: EngineContext) -> Embedder:
    from millstream_server.engines.vllm.embedder import VllmEmbedder  # noqa: PLC0415

    common: VectorEngineSettings = context.common
    if common.rank_answers:
        raise SettingsError(
            "--rank-answers: vLLM workers don't rank by answers; use --engine sglang or "
            "--engine transformers"
        )
    given = dict(common.engine_args.values)
    config = VllmEngineConfig(**of_settings(context, "vllm", given))
    return VllmEmbedder(config, common.cuts)


def _generator(own: VllmSettings, context: EngineContext) -> GeneratorEngine:
    from millstream_server.engines.vllm.engine import VllmEngine  # noqa: PLC0415

    return VllmEngine(engine_config(own, context))


ADAPTER = Adapter(
    name="vllm",
    packages=("torch", "vllm"),
    generator=Offer(settings=VllmSettings, make=_generator, read_arguments=_read_for_text),
    pixels=transformers.pixels,
    embedder=Offer(make=_embedder, read_arguments=_read_for_vectors),
    environment=OwnEnvironment("vllm", ".venv-vllm", "make setup-vllm"),
    preload="millstream_server.engines.vllm.preload:PRELOAD",
)
