"""How an SGLang engine is started: our settings, and SGLang's arguments made from them."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.config import EngineConfig
from millstream_server.engines.sglang import dllm
from millstream_server.engines.torch_on_cpu import resolved
from millstream_server.generation.sampling import Ability
from millstream_server.runtime.errors import EngineFailedError

_NOT_RESUMED = frozenset({"speculative_algorithm", "tp_size", "pp_size", "ep_size"})
"""Arguments with which `engines.sglang.resume` was never run."""
_SPREAD = frozenset({"tp_size", "pp_size", "dp_size", "ep_size", "dist_init_addr", "nccl_port"})
"""Arguments of engines that are several processes, or say themselves where these meet."""
_RDMA = Path("/sys/class/infiniband")
_DISAGGREGATION_MODES = {
    Role.AGGREGATED: "null",
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
    Role.EMBEDDING: "null",
    Role.DIFFUSION: "null",
}

_CPU_DEFAULTS: Mapping[str, object] = {
    # SGLang's plain PyTorch paths; everything else needs a GPU or AMX.
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    # By default the idle scheduler spins; several engines share a development machine's cores.
    "sleep_on_idle": True,
    # Else SGLang takes most of the host's memory for the KV pool.
    "max_total_tokens": 8192,
    "max_running_requests": 16,
}


LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of most models, which most adapters change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangEngineConfig(EngineConfig):
    """Settings of one SGLang engine."""

    transfer_backend: str = "nixl"
    """Must be the same for prefill and decode; the CPU stand-in supports NIXL only."""
    deterministic: bool = False
    """Batch-invariant kernels: slower, but enables a request's seed (`Ability.SEED`)."""
    engine_tokenizer: bool = False
    """Give SGLang the tokenizer: needed for `MIN_NEW_TOKENS` and `CONSTRAINTS`."""
    grammar_timeout_s: float = 30.0
    """A grammar that compiles longer fails its request."""
    metrics: bool = True
    """Export SGLang's own metrics (`engines.sglang.metrics`)."""
    multimodal: bool | None = None
    """Whether SGLang takes images and videos; None: the engine finds out from the model's files."""
    ability: Mapping[str, object] = field(default_factory=dict)
    """Fields of SGLang's ServerArgs that the role and the model need; `extra` can't change them."""
    otlp_endpoint: str = ""
    """Collector of SGLang's spans, http://HOST:PORT; empty: SGLang traces nothing."""
    nodes: int = 1
    """Processes over which the model is spread; each has a rank, 0 leads."""
    node_rank: int = 0
    leader_address: str = ""
    """HOST:PORT where they meet; needed with `nodes` above 1."""
    memory_saver: bool = False
    """Let memory be released on a GPU (`control.operations`); costs host memory for the weights."""
    lora_target_modules: Sequence[str] = LORA_MODULES
    """Layers that adapters may change."""
    kv_events_port: int = 0
    """Of rank 0's machine: where data-parallel ranks on other machines send their KV events."""
    kv_publisher: str = ""
    """SGLang's `kv_events_config`; the engine sets it."""
    tool_call_parser: str = ""
    """Announced only, as the next."""
    reasoning_parser: str = ""
    log_level: str = "warning"
    """Level of SGLang's loggers, in this process and in those it spawns."""

    def resolved_device(self) -> str:
        return resolved(self.device)

    @property
    def computes_alone(self) -> bool:
        """Whether one process computes, which has no others to meet."""
        return self.nodes == 1 and not _SPREAD & self.extra.keys()

    @property
    def may_resume(self) -> bool:
        """Whether it may go on with other engines' requests: what it excludes was never tried."""
        return (
            self.role is not Role.DIFFUSION
            and self.engine_tokenizer
            and self.nodes == 1
            and self.extra.get("grammar_backend", "xgrammar") == "xgrammar"
            and not _NOT_RESUMED & self.extra.keys()
        )

    def abilities(self) -> frozenset[Ability]:
        if self.role is Role.DIFFUSION:
            return frozenset()
        found = {Ability.LOGIT_BIAS}
        if self.deterministic:
            found.add(Ability.SEED)
        if self.engine_tokenizer:
            found |= {Ability.MIN_NEW_TOKENS, Ability.CONSTRAINTS}
            if self.extra.get("grammar_backend", "xgrammar") == "xgrammar":
                found.add(Ability.STRUCTURAL_TAGS)
        if self.role is not Role.DECODE:
            # A decode engine gets the prompt's KV cache, not its logits.
            found.add(Ability.PROMPT_LOGPROBS)
        return frozenset(found)


def engine_arguments(
    config: SglangEngineConfig, known_fields: Collection[str]
) -> dict[str, object]:
    """Make the keyword arguments of `sgl.Engine`.

    ``known_fields`` are the names of ServerArgs' fields in the SGLang that is installed.

    Raises:
        EngineFailedError: `extra` names a field that is unknown or managed by us.
    """
    on_cpu = config.on_cpu
    defaults = dict(dllm.DEFAULTS) if config.role is Role.DIFFUSION else {}
    if on_cpu:
        defaults |= _CPU_DEFAULTS
    if config.max_loras_per_batch and on_cpu:
        defaults["lora_backend"] = "torch_native"
    if config.multimodal and on_cpu:
        defaults["mm_attention_backend"] = "sdpa"  # the others need Triton or CUDA
    if config.engine_tokenizer:
        # Between JSON's parts a weak model goes on with blanks until its tokens are used up.
        defaults["constrained_json_max_whitespace_cnt"] = _MOST_BLANKS
    managed = _managed_arguments(config)
    for name in config.extra:
        if name not in known_fields:
            raise EngineFailedError(f"extra: SGLang has no server argument {name!r}.")
        if name in managed:
            raise EngineFailedError(
                f"extra: {name!r} follows from the engine's other settings; set those."
            )
    missing = sorted((managed.keys() | defaults.keys()) - set(known_fields))
    if missing:
        message = f"This SGLang has no server argument {', '.join(missing)}: update the adapter."
        raise EngineFailedError(message)
    return {**defaults, **managed, **config.extra}


_GRAMMAR_POLL_S = 0.005
_MOST_BLANKS = 16
"""In a row, between two parts of JSON that fits a schema: enough for indented JSON."""


def _managed_arguments(config: SglangEngineConfig) -> dict[str, object]:
    arguments: dict[str, object] = {
        "model_path": config.model_path,
        "device": config.resolved_device(),
        "dtype": config.resolved_dtype,
        "log_level": config.log_level,
        # Token ids in, token ids out: the Processor handles text.
        "skip_tokenizer_init": not config.engine_tokenizer,
        # Makes chunks disjoint; otherwise they are cumulative and SGLang extends them later.
        "incremental_streaming_output": True,
        "disaggregation_mode": _DISAGGREGATION_MODES[config.role],
        "enable_metrics": config.metrics,
    }
    if config.nodes > 1:
        arguments["nnodes"] = config.nodes
        arguments["node_rank"] = config.node_rank
        arguments["dist_init_addr"] = config.leader_address
    if config.otlp_endpoint:
        arguments["enable_trace"] = True
        # SGLang uses plaintext for everything but https://, with or without a scheme.
        arguments["otlp_traces_endpoint"] = config.otlp_endpoint.removeprefix("http://")
    if config.multimodal:
        # It divides batches, no more than that here: without it a batch that has both pixels and
        # embeddings ends the scheduler.
        arguments["enable_adaptive_dispatch_to_encoder"] = True
    if config.memory_saver:
        # Else the weights' content is lost with their memory.
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    arguments |= _adapters(config)
    arguments |= {name: value for name, value in _optional(config) if value is not None}
    arguments |= config.ability
    return arguments | _disaggregation(config)


def _optional(config: SglangEngineConfig) -> Iterable[tuple[str, object]]:
    """Return what SGLang has defaults for; None leaves it to SGLang."""
    yield "served_model_name", config.served_model_name or None
    yield "max_total_tokens", config.max_total_tokens
    yield "max_running_requests", config.max_running_requests
    yield "context_length", config.context_length
    yield "enable_deterministic_inference", config.deterministic or None
    yield "enable_multimodal", config.multimodal
    yield "kv_events_config", config.kv_publisher or None


def _disaggregation(config: SglangEngineConfig) -> dict[str, object]:
    arguments: dict[str, object] = {}
    if config.role.hands_off:
        arguments["disaggregation_transfer_backend"] = config.transfer_backend
        arguments["host"] = config.bootstrap_host
    if config.role is Role.PREFILL:
        arguments["disaggregation_bootstrap_port"] = config.bootstrap_port
    if config.role is Role.DECODE and config.on_cpu:
        # The default, a pinned host pool, calls the CUDA runtime.
        arguments["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return arguments


def _adapters(config: SglangEngineConfig) -> dict[str, object]:
    if not config.max_loras_per_batch:
        return {}
    return {
        "enable_lora": True,
        # One place more: requests without an adapter take one, too.
        "max_loras_per_batch": config.max_loras_per_batch + 1,
        "max_lora_rank": config.max_lora_rank,
        "lora_target_modules": list(config.lora_target_modules),
    }


def data_parallel_ranks(arguments: Mapping[str, Any]) -> int:
    """Return how many schedulers have a cache of their own, given or resolved by SGLang.

    Replicas and data-parallel attention, which SGLang has under `attn_dp_size`, exclude each other.
    """
    return int(arguments.get("dp_size") or 1) * int(arguments.get("attn_dp_size") or 1)


def engine_environment(config: SglangEngineConfig) -> dict[str, str]:
    """Return the environment variables that SGLang reads instead of arguments.

    Raises:
        EngineFailedError: `bootstrap_host` does not resolve.
    """
    environment: dict[str, str] = {}
    if config.node_rank:
        # Else the constructor of such an engine never returns.
        environment["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    if config.otlp_endpoint:
        # One span per stage of a request; by default there is one per decode step, so per token.
        environment["SGLANG_TRACE_LEVEL"] = "1"
    if config.multimodal or config.engine_tokenizer:
        # To draw a token from NaN ends the scheduler. A picture can drive a vision tower in half
        # precision to NaN; and where a grammar allows no token, or only those that min_new_tokens
        # forbids, all logits are -inf, and so their softmax NaN.
        environment["SGLANG_SANITIZE_NAN_LOGITS"] = "1"
    if config.engine_tokenizer:
        # Their product is the time (`scheduling/on_path/`); without that plugin, polls are counted.
        polls = max(1, math.ceil(config.grammar_timeout_s / _GRAMMAR_POLL_S))
        environment["SGLANG_GRAMMAR_POLL_INTERVAL"] = str(_GRAMMAR_POLL_S)
        environment["SGLANG_GRAMMAR_MAX_POLL_ITERATIONS"] = str(polls)
    if config.role is Role.DIFFUSION:
        environment.update(dllm.ENVIRONMENT)
    if not config.role.hands_off:
        return environment
    # From when the request came to prefill, and from when decode has room for it.
    seconds = str(math.ceil(config.handoff_wait_s))
    address = first_address(config.bootstrap_host, "bootstrap_host")
    if ipaddress.ip_address(address).is_loopback and not any(_RDMA.glob("*")):
        # Else UCX listens on every interface. RDMA may be the way between a machine's own GPUs.
        environment["UCX_NET_DEVICES"] = os.environ.get("UCX_NET_DEVICES", "lo")
    return {
        **environment,
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": seconds,
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": seconds,
        # The address for KV sockets and peers; SGLang would guess an interface.
        "SGLANG_HOST_IP": address,
    }


def first_address(host: str, setting: str) -> str:
    """Resolve a host's name, which ``setting`` has.

    Raises:
        EngineFailedError: it doesn't resolve.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        message = f"{setting}: {host!r} does not resolve to an address."
        raise EngineFailedError(message) from error
    return str(found[0][4][0])
