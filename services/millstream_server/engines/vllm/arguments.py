"""vLLM's own arguments, as its own command line reads them, without those that we set.

vLLM is imported only when there are arguments.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from typing import Any

from millstream_server.engines import torch_on_cpu
from millstream_server.engines.torch_on_cpu import resolved
from millstream_server.runtime.settings.arguments import ArgumentList

_TEXT = "vLLM sees token ids only; the Processor turns text into them"
_OURS = "Millstream sets it"
_NODES = "a vLLM worker runs on one machine"

_EVERYWHERE: Mapping[str, str] = {
    "config": "write vLLM's arguments into engine_args of our file, --config",
    "model": "--model-path",
    "tokenizer": "--model-path",
    "served_model_name": "--model-name",
    "max_model_len": "--context-length",
    "max_num_seqs": "--max-running-requests",
    "runner": "it follows from the service",
    "profiler_config": "record profiles with StartProfile (`millstream admin`)",
    "otlp_traces_endpoint": "Millstream's spans are those of a vLLM worker",
    "reasoning_parser": _TEXT,
    "nnodes": _NODES,
    "node_rank": _NODES,
    "master_addr": _NODES,
    "master_port": _NODES,
    "data_parallel_address": _NODES,
    "data_parallel_rank": _NODES,
    "data_parallel_start_rank": _NODES,
    "data_parallel_external_lb": _NODES,
    "data_parallel_hybrid_lb": _NODES,
}

GENERATION: Mapping[str, str] = {
    **_EVERYWHERE,
    "kv_transfer_config": "--kv-connector; the rest follows from the service",
    "kv_events_config": "--kv-events and WorkerService.WatchKvEvents",
    "num_gpu_blocks_override": "--max-total-tokens",
    "prefix_caching_hash_algo": _OURS,
    "scheduling_policy": _OURS,
    "max_logprobs": _OURS,
    "logprobs_mode": _OURS,
    "enable_lora": "--max-loras-per-batch",
    "max_loras": "--max-loras-per-batch",
    "limit_mm_per_prompt": "it follows from the model",
    "enable_mm_embeds": _OURS,
    "mm_processor_cache_gb": _OURS,
    "mm_device_do_normalize": _OURS,
    "worker_extension_cls": _OURS,
}
"""Of the engine of a prefill or decode worker."""

VECTORS: Mapping[str, str] = {**_EVERYWHERE, "pooler_config": "it follows from the model"}
"""Of an embedding worker's engine."""


def engine_arguments(device: str, managed: Mapping[str, str]) -> ArgumentList:
    """Return the arguments of vLLM's engine, on a device of the settings."""

    def add_to(parser: argparse.ArgumentParser) -> Mapping[str, str]:
        if resolved(device) == "cpu":
            torch_on_cpu.prepare()
        module: Any = importlib.import_module("vllm.engine.arg_utils")
        module.AsyncEngineArgs.add_cli_args(parser)
        return {}

    return ArgumentList(engine="vLLM", managed=managed, add_to=add_to)
