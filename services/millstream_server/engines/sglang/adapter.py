"""The SGLang adapter: its settings, and its engines made from them.

The functions raise SettingsError: settings contradict each other, or the model's files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millstream_server.control.engine import Follower, Role
from millstream_server.diffusion.diffuser import Diffuser
from millstream_server.embedding.embedder import Embedder
from millstream_server.encode.encoder import MediaEncoder
from millstream_server.engines.adapter import (
    Adapter,
    DiffuserEngineSettings,
    DllmSettings,
    EngineContext,
    NodeSettings,
    Offer,
    TextEngineSettings,
    VectorEngineSettings,
    model_folder,
)
from millstream_server.engines.config import of_settings
from millstream_server.engines.sglang import arguments, dllm
from millstream_server.engines.sglang.config import LORA_MODULES, SglangEngineConfig
from millstream_server.engines.sglang.diffusion.config import INDEX, SglangDiffuserConfig
from millstream_server.engines.torch_on_cpu import resolved
from millstream_server.engines.transformers import adapter as transformers
from millstream_server.generation.generator import GeneratorEngine
from millstream_server.media.families.family import Family
from millstream_server.runtime.settings import EngineArguments, SettingsError, setting
from millstream_server.runtime.settings.arguments import read_arguments

# By name, as it is a fact of SGLang: whose towers it can load without their language model.
_TOWERS = frozenset({"qwen2_5_vl", "qwen3_vl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """Settings that only SGLang reads, to generate text."""

    engine_tokenizer: bool = setting(
        default=False, help="give the engine a tokenizer: enables min_new_tokens and constraints"
    )
    grammar_timeout_s: float = setting(
        30.0, help="sglang: a request fails whose grammar compiles longer"
    )
    kv_events_port: int = setting(
        0,
        help="where data-parallel ranks of other machines send KV events: the first of so many "
        "free ports of rank 0's machine; 0: there are none over several machines",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangDiffusionSettings:
    """Settings that only SGLang's diffusion engine reads."""

    model_id: str = setting(
        "",
        help="sglang: published name of the model, as Z-Image-Turbo; empty: by the folder's name "
        "or the pipeline's class",
    )
    num_gpus: int = setting(1, help="sglang: GPUs that one output is spread over")
    cancel_timeout_s: float = setting(
        10.0,
        help="sglang: an engine that goes on so long after a cancel is killed and started again; "
        "at least three times its longest step",
    )


# ---- text ----------------------------------------------------------------------------------------


def _read_for_text(_own: SglangSettings, common: TextEngineSettings) -> EngineArguments:
    known = arguments.server_arguments(common.device, arguments.GENERATION)
    read = read_arguments(common.engine_args, known)
    check_parts(common.topology, read)
    check_lora(common, read)
    if read.values.get("enable_memory_saver") and resolved(common.device) == "cpu":
        raise SettingsError("-- --enable-memory-saver frees the memory of a GPU; there is none")
    return read


def check_parts(topology: NodeSettings, given: EngineArguments) -> None:
    """Check that the processes of a model can share it evenly."""
    topology.check()
    sizes = {name: given.values.get(name, 1) for name in ("tp_size", "pp_size")}
    parts, nodes = sizes["tp_size"] * sizes["pp_size"], topology.nodes
    if nodes > 1 and (min(sizes.values()) < 1 or parts % nodes):
        raise SettingsError(
            f"--nodes {nodes}: SGLang's tp_size x pp_size is {parts}, which {nodes} "
            f"processes can't share evenly; give -- --tp-size {nodes * max(1, parts)}"
        )


def check_lora(common: TextEngineSettings, given: EngineArguments) -> None:
    """Check which adapters can be loaded at runtime; memory for them is taken at the start."""
    if common.max_loras_per_batch < 0:
        raise SettingsError(f"--max-loras-per-batch is {common.max_loras_per_batch}, not 0 or up")
    values = given.values
    rank, modules = values.get("max_lora_rank"), values.get("lora_target_modules")
    if not common.max_loras_per_batch:
        if rank is not None or modules is not None:
            raise SettingsError(
                "-- --max-lora-rank and --lora-target-modules need --max-loras-per-batch"
            )
        return
    if rank is not None and rank < 1:
        raise SettingsError(f"-- --max-lora-rank is {rank}, not 1 or up")
    if modules is not None and (not modules or "all" in modules):
        raise SettingsError("-- --lora-target-modules: name the layers, such as q_proj v_proj")
    if (ranks := values.get("dp_size", 1)) != 1:
        raise SettingsError(
            f"--max-loras-per-batch: SGLang can't load adapters with --dp-size {ranks}; start "
            "more workers instead"
        )


def engine_config(own: SglangSettings, context: EngineContext) -> SglangEngineConfig:
    """Make the configuration of one engine."""
    common: TextEngineSettings = context.common
    given = dict(common.engine_args.values)
    return SglangEngineConfig(
        transfer_backend=given.pop("disaggregation_transfer_backend", "nixl"),
        deterministic=given.pop("enable_deterministic_inference", False),
        engine_tokenizer=own.engine_tokenizer,
        grammar_timeout_s=own.grammar_timeout_s,
        otlp_endpoint=context.otlp_endpoint,
        ability=_dllm(context, common),
        memory_saver=given.pop("enable_memory_saver", False),
        lora_target_modules=given.pop("lora_target_modules", LORA_MODULES),
        kv_events_port=own.kv_events_port,
        # Announced only: with the second SGLang would apply constraints behind thoughts alone.
        tool_call_parser=given.pop("tool_call_parser", ""),
        reasoning_parser=given.pop("reasoning_parser", ""),
        **_of_both(context, given),
    )


def _of_both(context: EngineContext, given: dict[str, Any]) -> dict[str, Any]:
    """Return what engines for text and for vectors are configured with.

    ``given``: SGLang's own arguments; what isn't taken out of them is passed on.
    """
    common: TextEngineSettings | VectorEngineSettings = context.common
    return {
        "metrics": context.metrics,
        "nodes": common.topology.nodes,
        "node_rank": common.topology.node_rank,
        "leader_address": common.topology.leader_address,
        "log_level": given.pop("log_level", "warning"),
        **of_settings(context, "sglang", given),
    }


def _dllm(context: EngineContext, common: TextEngineSettings) -> dict[str, object]:
    """Return the ServerArgs of a diffusion language model; none in other roles."""
    if context.role is not Role.DIFFUSION:
        return {}
    if common.max_loras_per_batch:
        raise SettingsError(
            "--max-loras-per-batch: SGLang has no LoRA for diffusion language models"
        )
    settings = context.dllm or DllmSettings()
    names = ", ".join(dllm.ALGORITHMS)
    if not settings.dllm_algorithm:
        raise SettingsError(
            "--dllm-algorithm is required with --engine sglang: how the model's blocks are "
            f"denoised, one of {names}; LowConfidence is for SDAR and LLaDA2 models"
        )
    if settings.dllm_algorithm not in dllm.ALGORITHMS:
        raise SettingsError(f"--dllm-algorithm: {settings.dllm_algorithm!r} is not one of {names}")
    arguments: dict[str, object] = {"dllm_algorithm": settings.dllm_algorithm}
    if (file := settings.dllm_config) is not None:
        if not file.is_file():
            raise SettingsError(f"--dllm-config {file}: there is no such file")
        arguments["dllm_algorithm_config"] = str(file)
    return arguments


def _generator(own: SglangSettings, context: EngineContext) -> GeneratorEngine:
    from millstream_server.engines.sglang.engine import SglangEngine  # noqa: PLC0415

    return SglangEngine(engine_config(own, context))


def _text_follower(own: SglangSettings, context: EngineContext) -> Follower:
    from millstream_server.engines.sglang.lifetime import SglangFollower  # noqa: PLC0415

    return SglangFollower(engine_config(own, context))


# ---- vectors -------------------------------------------------------------------------------------


def _read_for_vectors(_own: None, common: VectorEngineSettings) -> EngineArguments:
    known = arguments.server_arguments(common.device, arguments.VECTORS)
    read = read_arguments(common.engine_args, known)
    check_parts(common.topology, read)
    return read


def embedder_config(context: EngineContext) -> SglangEngineConfig:
    """Make the configuration of an engine for vectors or scores.

    SGLang traces nothing here: one of its batches has inputs of several requests.

    Raises:
        SettingsError: the settings contradict each other.
    """
    given = dict(context.common.engine_args.values)
    return SglangEngineConfig(**_of_both(context, given))


def _embedder(_own: None, context: EngineContext) -> Embedder:
    from millstream_server.engines.sglang.embedder import SglangEmbedder  # noqa: PLC0415

    common: VectorEngineSettings = context.common
    return SglangEmbedder(embedder_config(context), common.cuts, common.rank_answers)


def _embeds(model_path: Path) -> bool:
    """Whether SGLang is right about a model; one that names no class is left to its own error."""
    from millstream_server.engines.sglang.vector_model import suits  # noqa: PLC0415

    return suits(model_path)


def _vector_follower(_own: None, context: EngineContext) -> Follower:
    from millstream_server.engines.sglang.lifetime import SglangFollower  # noqa: PLC0415
    from millstream_server.engines.sglang.vector_model import read_model, with_ability  # noqa: PLC0415

    config = replace(embedder_config(context), metrics=False)  # nobody would read them
    model = read_model(Path(config.model_path), answers=context.common.rank_answers)
    return SglangFollower(with_ability(config, model))


# ---- images and videos ---------------------------------------------------------------------------


def _encodes(family: Family) -> bool:
    return family.name in _TOWERS


def _encoder(_own: None, context: EngineContext) -> MediaEncoder:
    from millstream_server.engines.sglang.tower import SglangTower  # noqa: PLC0415
    from millstream_server.engines.transformers.encoder import TowerEncoder  # noqa: PLC0415

    config = transformers.tower_config(context)
    family = transformers.family_of(config.model_path)
    if not _encodes(family):
        raise SettingsError(
            f"--engine sglang: SGLang can't run the vision tower of {family.name} without its "
            "engine; use --engine transformers"
        )
    return TowerEncoder(config, SglangTower(config))


def _read_for_diffusion(
    _own: SglangDiffusionSettings, common: DiffuserEngineSettings
) -> EngineArguments:
    known = arguments.diffusion_arguments(common.device)
    return read_arguments(common.engine_args, known)


def diffuser_config(own: SglangDiffusionSettings, context: EngineContext) -> SglangDiffuserConfig:
    """Make the configuration of an engine for images or videos."""
    common: DiffuserEngineSettings = context.common
    model_path = model_folder(context.model_path, "sglang", "a pipeline's folder", INDEX)
    if own.num_gpus < 1:
        raise SettingsError(f"--num-gpus is {own.num_gpus}, not 1 or more")
    if own.cancel_timeout_s <= 0:
        raise SettingsError(f"--cancel-timeout-s is {own.cancel_timeout_s:g}, not above 0")
    given = dict(common.engine_args.values)
    return SglangDiffuserConfig(
        model_path=model_path,
        model_id=own.model_id,
        device=common.device,
        num_gpus=own.num_gpus,
        warm_up_timeout_s=common.warm_up_timeout_s,
        cancel_timeout_s=own.cancel_timeout_s,
        log_level=given.pop("log_level", "warning"),
        extra=given,  # what is left
    )


def _diffuser(own: SglangDiffusionSettings, context: EngineContext) -> Diffuser:
    from millstream_server.engines.sglang.diffuser import SglangDiffuser  # noqa: PLC0415

    return SglangDiffuser(diffuser_config(own, context))


def _suite_flags(service: str, _model: Path) -> list[str]:
    if service in ("prefill", "decode"):
        return ["--engine-tokenizer", "true"]  # for structured output
    return ["--dllm-algorithm", "LowConfidence"] if service == "dllm" else []


_TEXT: Offer[GeneratorEngine] = Offer(
    settings=SglangSettings,
    make=_generator,
    read_arguments=_read_for_text,
    follow=_text_follower,
)

ADAPTER = Adapter(
    name="sglang",
    packages=("torch", "sglang"),
    generator=_TEXT,
    text_diffuser=_TEXT,
    encoder=Offer(make=_encoder),
    encodes=_encodes,
    pixels=transformers.pixels,
    diffuser=Offer(
        settings=SglangDiffusionSettings, make=_diffuser, read_arguments=_read_for_diffusion
    ),
    embedder=Offer(make=_embedder, read_arguments=_read_for_vectors, follow=_vector_follower),
    embeds=_embeds,
    preload="millstream_server.engines.sglang.preload:PRELOAD",
    suite_flags=_suite_flags,
)
