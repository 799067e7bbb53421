"""The SGLang adapter's settings, and the engine's configuration made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, Self

from millstream_server.engines.base import Role
from millstream_server.engines.settings import DllmSettings, EngineContext
from millstream_server.engines.sglang import cpu as sglang_cpu
from millstream_server.engines.sglang import dllm
from millstream_server.engines.sglang import managed as managed_arguments
from millstream_server.engines.sglang.arguments import server_arguments
from millstream_server.engines.sglang.config import LORA_MODULES, MAX_LORA_RANK, SglangEngineConfig
from millstream_server.engines.sglang.lora_settings import LoraSettings
from millstream_server.engines.sglang.nodes import NodeSettings
from millstream_server.model_files.state import expect_weights
from millstream_server.runtime.settings import EngineArguments, SettingsError, group, setting
from millstream_server.runtime.settings.arguments import ArgumentList, read_arguments

ENGINE_ARGS_HELP = "the engine's own arguments: behind --, not as a flag"
OWN_ARGUMENTS: Mapping[str, str] = {
    "dtype": "give SGLang's own argument: -- --dtype TYPE",
    "engine_log_level": "give SGLang's own argument: -- --log-level LEVEL",
}
"""Settings that have gone, as SGLang has them: what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """Settings that only SGLang reads."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        **OWN_ARGUMENTS,
        "deterministic": "give SGLang's own argument: -- --enable-deterministic-inference",
        "memory_saver": "give SGLang's own argument: -- --enable-memory-saver",
        "reasoning_parser": "give SGLang's own argument: -- --reasoning-parser NAME",
        "tool_call_parser": "give SGLang's own argument: -- --tool-call-parser NAME",
        "transfer_backend": "give SGLang's own argument: -- --disaggregation-transfer-backend NAME",
    }

    device: Literal["auto", "cuda", "cpu"] = setting("auto", help="auto, cuda or cpu")
    max_total_tokens: int = setting(0, help="KV cache size in tokens; 0: what fits")
    engine_tokenizer: bool = setting(
        default=False, help="give the engine a tokenizer: enables min_new_tokens and constraints"
    )
    engine_args: EngineArguments = setting(EngineArguments(), help=ENGINE_ARGS_HELP)
    warm_up_timeout_s: float = setting(120.0, help="longest warm-up before the start fails")
    kv_events: bool = setting(
        default=True, help="tell what the prefix cache holds, for routing (WatchKvEvents)"
    )
    kv_events_port: int = setting(
        0,
        help="where data-parallel ranks of other machines send KV events: the first of so many "
        "free ports of rank 0's machine; 0: there are none over several machines",
    )
    lora: LoraSettings = group(LoraSettings)
    topology: NodeSettings = group(NodeSettings)

    def checked(self) -> Self:
        """Return the settings with SGLang's own arguments read.

        Raises:
            SettingsError: one is unknown, wrong, or managed by us, or doesn't fit to `topology`.
        """
        known = server_argument_list(self.device, managed_arguments.GENERATION)
        read = read_arguments(self.engine_args, known)
        self.topology.check(read)
        self.lora.check(read)
        on_cpu = self.device == "cpu" or (self.device == "auto" and not sglang_cpu.gpu_present())
        if read.values.get("enable_memory_saver") and on_cpu:
            raise SettingsError("-- --enable-memory-saver frees the memory of a GPU; there is none")
        return replace(self, engine_args=read)


def server_argument_list(device: str, managed: Mapping[str, str]) -> ArgumentList:
    """Return the arguments of SGLang's engine, on a device as the settings have it."""
    on_cpu = device == "cpu" or (device == "auto" and not sglang_cpu.gpu_present())
    add_to = partial(server_arguments, on_cpu=on_cpu)
    return ArgumentList(engine="SGLang", managed=managed, add_to=add_to)


def engine_config(settings: SglangSettings, context: EngineContext) -> SglangEngineConfig:
    """Make the configuration of one engine.

    Raises:
        SettingsError: the settings contradict each other.
    """
    common, lora = context.common, settings.lora
    own = dict(settings.engine_args.values)
    return SglangEngineConfig(
        model_path=str(model_directory(context.model_path)),
        role=context.role,
        device=settings.device,
        dtype=own.pop("dtype", "auto"),
        bootstrap_host=common.bootstrap_host,
        bootstrap_port=common.bootstrap_port,
        transfer_backend=own.pop("disaggregation_transfer_backend", "nixl"),
        transfer_timeout_s=common.transfer_timeout_s,
        max_total_tokens=settings.max_total_tokens or None,
        max_running_requests=common.max_running_requests or None,
        context_length=common.context_length or None,
        deterministic=own.pop("enable_deterministic_inference", False),
        engine_tokenizer=settings.engine_tokenizer,
        served_model_name=context.model_name,
        metrics=context.metrics,
        otlp_endpoint=context.otlp_endpoint,
        warm_up_timeout_s=settings.warm_up_timeout_s,
        ability=_dllm(context, lora),
        memory_saver=own.pop("enable_memory_saver", False),
        max_loras_per_batch=lora.max_loras_per_batch,
        max_lora_rank=own.pop("max_lora_rank", MAX_LORA_RANK),
        lora_target_modules=own.pop("lora_target_modules", LORA_MODULES),
        nodes=settings.topology.nodes,
        node_rank=settings.topology.node_rank,
        leader_address=settings.topology.leader_address,
        log_level=own.pop("log_level", "warning"),
        kv_events=settings.kv_events,
        kv_events_port=settings.kv_events_port,
        # Announced only: with the second SGLang would apply constraints behind thoughts alone.
        tool_call_parser=own.pop("tool_call_parser", ""),
        reasoning_parser=own.pop("reasoning_parser", ""),
        extra=own,  # what is left
    )


def model_directory(path: Path | None) -> Path:
    """Return the directory of a model's files.

    Raises:
        SettingsError: it is none, or its download isn't complete.
    """
    if path is None:
        raise SettingsError("--model-path is required with --engine sglang: a model directory")
    expect_weights(path)
    if not (path / "config.json").is_file():
        raise SettingsError(f"--model-path {path}: there is no config.json in it")
    return path


def _dllm(context: EngineContext, lora: LoraSettings) -> dict[str, object]:
    """Return the ServerArgs of a diffusion language model; none in other roles."""
    if context.role is not Role.DIFFUSION:
        return {}
    if lora.max_loras_per_batch:
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
