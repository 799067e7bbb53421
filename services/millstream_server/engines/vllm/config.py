"""How a vLLM engine is started: our settings, and vLLM's arguments made from them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from millstream_server.control.engine import Role
from millstream_server.engines.config import EngineConfig
from millstream_server.engines.torch_on_cpu import DEFAULTS
from millstream_server.generation.sampling import Ability
from millstream_server.generation.validation import MAX_TOP_LOGPROBS
from millstream_server.runtime.errors import EngineFailedError

CPU_BLOCK_SIZE = 32
"""Tokens of a block; attention on a CPU takes multiples of 32 only."""
_CPU_TOTAL_TOKENS = 8192
_CPU_RUNNING = {role: 64 if role is Role.EMBEDDING else 16 for role in Role}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")

Connector = Literal["push", "pull"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngineConfig(EngineConfig):
    """Settings of one vLLM engine."""

    connector: Connector = "push"
    """Prefill sends the KV cache while both legs run, or decode reads it once prefill has ended."""
    metrics: bool = False
    """Export vLLM's own metrics (`engines.vllm.metrics`)."""
    kv_publisher: Mapping[str, Any] | None = None
    """vLLM's `KVEventsConfig`; the engine sets it."""
    profile_folder: str = ""
    """Where vLLM writes profiles; the engine sets it."""
    media: Mapping[str, int] | None = None
    """Most items of each kind in a prompt, for a model that takes media; the engine sets it."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether vLLM gets the model's tokenizer: constraints need it."""
        skipped = self.extra.get("skip_tokenizer_init")
        return not skipped and any(Path(self.model_path, name).is_file() for name in _TOKENIZERS)

    def abilities(self) -> frozenset[Ability]:
        """Return the abilities of an engine with this configuration."""
        found = {Ability.LOGIT_BIAS, Ability.SEED, Ability.MIN_NEW_TOKENS}
        if self.extra.get("speculative_config"):
            found -= {Ability.LOGIT_BIAS}
        if self.has_tokenizer:
            found.add(Ability.CONSTRAINTS)
            if "structured_outputs_config" not in self.extra:  # else the backend may be another
                found.add(Ability.STRUCTURAL_TAGS)
        if self.role is not Role.DECODE:
            # A decode engine gets the prompt's KV cache, not its logits.
            found.add(Ability.PROMPT_LOGPROBS)
        return frozenset(found)


def engine_arguments(config: VllmEngineConfig) -> dict[str, object]:
    """Make the keyword arguments of vLLM's `AsyncEngineArgs`, without those of its own classes.

    Raises:
        EngineFailedError: `extra` names an argument that is managed by us.
    """
    managed = _managed(config)
    for name in config.extra:
        if name in managed:
            raise EngineFailedError(
                f"extra: {name!r} follows from the engine's other settings; set those."
            )
    return {**_defaults(config), **managed, **config.extra}


def _defaults(config: VllmEngineConfig) -> dict[str, object]:
    defaults: dict[str, object] = {
        # One backend for all requests, chosen here: by default the first request chooses.
        "structured_outputs_config": {"backend": "xgrammar"},
        "seed": 0,
    }
    if config.on_cpu:
        defaults |= {"enforce_eager": True}  # else it compiles C++ for minutes
        defaults |= {"block_size": CPU_BLOCK_SIZE}  # the default, 128, is more than most prompts
        # Only not to compare the machine's free memory with a share of it: `total_blocks` counts.
        defaults |= {"kv_cache_memory_bytes": 64 << 20}
    return defaults


def _managed(config: VllmEngineConfig) -> dict[str, object]:
    arguments: dict[str, object] = {
        "model": config.model_path,
        "dtype": config.resolved_dtype,
        "skip_tokenizer_init": not config.has_tokenizer,
    }
    if config.served_model_name:
        arguments["served_model_name"] = config.served_model_name
    if config.context_length:
        arguments["max_model_len"] = config.context_length
    elif _limits_tokens(config):
        arguments["max_model_len"] = -1  # the model's, or what fits into the KV cache
    running = config.max_running_requests or (_CPU_RUNNING[config.role] if config.on_cpu else None)
    if running:
        arguments["max_num_seqs"] = running
    if config.profile_folder:
        arguments["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": config.profile_folder,
        }
    if config.role is Role.EMBEDDING:
        return {**arguments, "runner": "pooling"}
    arguments |= {
        "scheduling_policy": "priority",
        "max_logprobs": MAX_TOP_LOGPROBS,
        "logprobs_mode": "raw_logprobs",  # before the temperature, as our contract has them
        # Other algorithms pickle what they hash, or have a random seed.
        "prefix_caching_hash_algo": "sha256_cbor",
    }
    if config.max_loras_per_batch:
        arguments |= {
            "enable_lora": True,
            "max_loras": config.max_loras_per_batch,
            "max_lora_rank": config.max_lora_rank,
        }
    if config.media is not None:
        arguments |= {
            "limit_mm_per_prompt": dict(config.media),
            "enable_mm_embeds": True,
            "mm_processor_cache_gb": 0,  # it assumes that vLLM has hashed the media
            # Pixels come normalized; by default the tower would do it a second time.
            "mm_device_do_normalize": False,
        }
    return arguments


_SIZES_OF_ITS_OWN = frozenset(
    {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override", "max_model_len"}
)


def _limits_tokens(config: VllmEngineConfig) -> bool:
    """Whether our settings say how large the KV cache is, and no argument of vLLM's own."""
    if _SIZES_OF_ITS_OWN.intersection(config.extra):
        return False
    return config.on_cpu or config.max_total_tokens is not None


def total_blocks(config: VllmEngineConfig, block_size: int) -> int | None:
    """Return how many KV blocks a rank shall have; None: what fits."""
    tokens = None
    if _limits_tokens(config):
        tokens = config.max_total_tokens or _CPU_TOTAL_TOKENS
    # vLLM keeps one for itself.
    return None if tokens is None else math.ceil(tokens / block_size) + 1


def engine_environment(config: VllmEngineConfig) -> dict[str, str]:
    """Return the environment variables that vLLM reads instead of arguments."""
    environment = {
        # A fork would inherit the locks of this process's threads.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if config.on_cpu:
        environment |= {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get(
            "VLLM_CPU_OMP_THREADS_BIND", "nobind"
        )
        if config.extra.get("enforce_eager", True):
            # Else the first logprobs stop all requests for 7 s: one function of theirs is compiled.
            environment["TORCHDYNAMO_DISABLE"] = os.environ.get("TORCHDYNAMO_DISABLE", "1")
    return environment
