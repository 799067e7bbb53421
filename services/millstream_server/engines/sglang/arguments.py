"""SGLang's own arguments, as its own command line reads them, without those that we set.

SGLang is imported only when there are arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping

from millstream_server.engines.sglang.importing import import_sglang
from millstream_server.engines.torch_on_cpu import resolved
from millstream_server.runtime.settings.arguments import ArgumentList

# ---- arguments that an operator can't set, and the settings of ours that do ----------------------

_TEXT = "SGLang sees token ids only; the Processor turns text into them"
_HTTP = "SGLang's HTTP server isn't started"
_OURS = "Millstream sets it"
_FILE = "write SGLang's arguments into engine_args of our file, --config"

_EVERYWHERE: Mapping[str, str] = {
    "config": _FILE,
    "model_path": "--model-path",
    "served_model_name": "--model-name",
    "device": "--device",
    "enable_metrics": "--metrics-listen",
    "host": "--listen",
    "port": "--listen",
    "api_key": _HTTP,
    "admin_api_key": _HTTP,
    "log_level_http": _HTTP,
    "ssl_keyfile": "--tls-key-file",
    "ssl_certfile": "--tls-cert-file",
    "ssl_ca_certs": "--tls-client-ca-file",
    "ssl_keyfile_password": _HTTP,
}

_MODELS: Mapping[str, str] = {
    **_EVERYWHERE,
    "max_total_tokens": "--max-total-tokens",
    "max_running_requests": "--max-running-requests",
    "context_length": "--context-length",
    "is_embedding": _OURS,
    "skip_tokenizer_init": _OURS,
    "incremental_streaming_output": _OURS,
    "disaggregation_mode": "vectors are made by one worker alone",
    "enable_trace": "traces of embedding workers are Millstream's own",
    "otlp_traces_endpoint": "traces of embedding workers are Millstream's own",
    "nnodes": "--nodes",
    "node_rank": "--node-rank",
    "dist_init_addr": "--leader-address",
    "chat_template": _TEXT,
    "completion_template": _TEXT,
}

VECTORS: Mapping[str, str] = {**_MODELS, "reasoning_parser": _TEXT, "tool_call_parser": _TEXT}
"""Of an embedding worker's engine."""

GENERATION: Mapping[str, str] = {
    **_MODELS,
    "is_embedding": "`python -m millstream_server.embedding` serves embedding models",
    "host": "--bootstrap-host",
    "skip_tokenizer_init": "--engine-tokenizer",
    "disaggregation_mode": "it follows from the service and, of a decode worker, from --mode",
    "disaggregation_bootstrap_port": "--bootstrap-port",
    "enable_trace": "--otlp-endpoint",
    "otlp_traces_endpoint": "--otlp-endpoint",
    "kv_events_config": "--kv-events and WorkerService.WatchKvEvents",
    "enable_multimodal": "it follows from the model",
    "enable_adaptive_dispatch_to_encoder": _OURS,
    "enable_lora": "--max-loras-per-batch",
    "max_loras_per_batch": "--max-loras-per-batch",
    "lora_paths": "load adapters with LoadLora (`millstream admin`)",
    "max_loaded_loras": "SGLang would remove adapters by itself",
    "enable_weights_cpu_backup": "--enable-memory-saver turns it on",
    "dllm_algorithm": "--dllm-algorithm of `python -m millstream_server.diffusion --kind text`",
    "dllm_algorithm_config": "--dllm-config of `python -m millstream_server.diffusion --kind text`",
}
"""Of the engine of a prefill or decode worker, or of one that makes text by diffusion."""

DIFFUSION: Mapping[str, str] = {
    **_EVERYWHERE,
    "nnodes": "a diffusion worker runs on one machine",
    "node_rank": "a diffusion worker runs on one machine",
    "model_id": "--model-id",
    "num_gpus": "--num-gpus",
    "backend": _OURS,
    "sleep_on_idle": _OURS,
    "warmup_mode": "Millstream warms up itself, --warm-up-timeout-s",
    "output_path": "--storage-url",
    "input_save_path": "nothing is written to files",
    "enable_trace": "traces of diffusion workers are Millstream's own",
    "otlp_traces_endpoint": "traces of diffusion workers are Millstream's own",
    "webui": _HTTP,
    "webui_port": _HTTP,
}
"""Of SGLang's engine for images and videos."""
# Of its diffusion engine's command line: flags of any part's name, --<part>-path and so on.
_ONLY_IN_FILE = (
    "component_paths",
    "component_weights_paths",
    "component_quantizations",
    "component_precisions",
    "component_direct_gpu_weight_loading",
    "component_quantization_ignored_layers",
)

# ---- the others ----------------------------------------------------------------------------------


def server_arguments(device: str, managed: Mapping[str, str]) -> ArgumentList:
    """Return the arguments of SGLang's engine for text and vectors, on a device of the settings."""

    def add_to(parser: argparse.ArgumentParser) -> Mapping[str, str]:
        module = import_sglang("sglang.srt.server_args", resolved(device))
        module.ServerArgs.add_cli_args(parser)
        return {}

    return ArgumentList(engine="SGLang", managed=managed, add_to=add_to)


def diffusion_arguments(device: str) -> ArgumentList:
    """Return the arguments of SGLang's engine for images and videos."""

    def add_to(parser: argparse.ArgumentParser) -> Mapping[str, str]:
        name = "sglang.multimodal_gen.runtime.server_args.server_args"
        module = import_sglang(name, resolved(device))
        module.ServerArgs.add_cli_args(parser)
        fields = {f.name for f in dataclasses.fields(module.ServerArgs)}
        actions = parser._actions  # noqa: SLF001 - argparse has no other list
        names = {action.dest for action in actions}
        # `DiffGenerator.from_pretrained` takes no others.
        return dict.fromkeys(names - fields, "SGLang takes it on its own command line only")

    return ArgumentList(
        engine="SGLang's diffusion engine",
        managed=DIFFUSION,
        add_to=add_to,
        only_in_file=_ONLY_IN_FILE,
    )
