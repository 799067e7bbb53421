"""vLLM's names that the adapter uses: which of them the installed vLLM lacks."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millstream_server.engines import torch_on_cpu
from millstream_server.engines.vllm import names

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[3]

_FIELDS = {
    "vllm.v1.engine.EngineCoreRequest": {
        *("request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params"),
        *("arrival_time", "lora_request", "cache_salt", "data_parallel_rank", "priority"),
        "external_req_id",
    },
    "vllm.v1.engine.EngineCoreOutputs": {
        *("engine_index", "outputs", "scheduler_stats", "weight_version"),
    },
    "vllm.v1.engine.EngineCoreOutput": {
        *("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors"),
        *("finish_reason", "stop_reason", "kv_transfer_params", "prefill_stats"),
        "pooling_output",
    },
    "vllm.sampling_params.SamplingParams": {
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "max_tokens"),
        *("min_tokens", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs"),
        *("extra_args", "detokenize", "output_kind", "skip_clone"),
    },
    "vllm.v1.metrics.stats.SchedulerStats": {
        *("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage"),
    },
    "vllm.v1.metrics.stats.PrefillStats": {"num_cached_tokens", "num_local_cached_tokens"},
    "vllm.engine.arg_utils.AsyncEngineArgs": {
        *("model", "dtype", "skip_tokenizer_init", "served_model_name", "max_model_len"),
        *("max_num_seqs", "profiler_config", "runner", "scheduling_policy", "max_logprobs"),
        *("logprobs_mode", "prefix_caching_hash_algo", "enable_lora", "max_loras"),
        *("max_lora_rank", "limit_mm_per_prompt", "enable_mm_embeds", "mm_processor_cache_gb"),
        *("mm_device_do_normalize", "structured_outputs_config", "enforce_eager", "block_size"),
        *("kv_cache_memory_bytes", "kv_transfer_config", "kv_events_config", "seed"),
        "worker_extension_cls",
    },
    "vllm.v1.engine.core_client.BackgroundResources": {"engine_manager", "ctx"},
    "vllm.v1.outputs.KVConnectorOutput": {"finished_recving"},
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata.ReqMeta": {"local_block_ids"},
}
_SOURCES = {
    "vllm.v1.core.sched.scheduler.Scheduler._update_from_kv_xfer_finished": (
        "98d49f74d3997d2bb14fb1b9fb470c709b97d1642a97aa96e96601f078f162ef",
        "engines/vllm/core_process.py wraps it: the end of a late transfer must not end the core",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker."
    "NixlPushConnectorWorker._do_start_push_kv": (
        "00e8b959396d92d5a161765cadba33d798b39b59114892ac23a3d484c54e098d",
        "engines/vllm/transfer_worker.py meets decode's engine before it, in the same way",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler."
    "NixlPushConnectorScheduler.update_state_after_alloc": (
        "f74b4180a21345579826f444fa07b9e51c1b90242a527272d068e94fbef66fb7",
        "engines/vllm/transfer_worker.py makes the same registration, without blocks",
    ),
}
"""SHA-256 of the source that ours was written against, and what ours does."""


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    torch_on_cpu.prepare()


def _of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _said(what: str) -> str:
    return (
        f"engines/vllm uses these {what}, which this vLLM lacks: find what has taken their place, "
        "change engines/vllm, then the list."
    )


def test_the_names_we_use_are_there() -> None:
    names.load()
    lacking = [
        f"{path}.{name}"
        for path, members in names.MEMBERS.items()
        for name in members
        if not hasattr(_of(path), name)
    ]
    assert lacking == [], _said("methods and functions")


def test_the_fields_we_use_are_there() -> None:
    lacking = []
    for path, wanted in _FIELDS.items():
        cls = _of(path)
        there = getattr(cls, "__struct_fields__", None) or cls.__dataclass_fields__
        lacking += [f"{path}.{name}" for name in sorted(wanted - set(there))]
    assert lacking == [], _said("fields")


def test_the_attributes_we_use_are_set() -> None:
    lacking = []
    for path, wanted in names.ATTRIBUTES.items():
        classes = [cls for cls in inspect.getmro(_of(path)) if cls.__module__.startswith("vllm.")]
        source = "".join(inspect.getsource(cls) for cls in classes)
        there = set(re.findall(r"^\s*self\.(\w+)(?:: [^=]*)? = ", source, re.MULTILINE))
        there |= set(re.findall(r"= self\.(\w+) = ", source))
        lacking += [f"{path}.{name}" for name in wanted if name not in there]
    assert lacking == [], _said("attributes")


@pytest.mark.parametrize("path", _SOURCES)
def test_the_code_that_ours_follows_is_the_same(path: str) -> None:
    known, ours = _SOURCES[path]
    owner, _, method = path.rpartition(".")
    source = inspect.getsource(getattr(_of(owner), method))
    assert hashlib.sha256(source.encode()).hexdigest() == known, (
        f"vLLM's {path} has changed: {ours}. Read it, change ours if need be, then the digest here."
    )


def test_the_chart_knows_the_engines_arguments() -> None:
    command = [sys.executable, "deploy/helm/engine_arguments.py", "--vllm", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_engines_own_arguments_are_read() -> None:
    """Each that we manage exists, so that none is refused in vain."""
    from argparse import SUPPRESS, ArgumentParser  # noqa: PLC0415

    from millstream_server.engines.vllm import arguments  # noqa: PLC0415

    parser = ArgumentParser(argument_default=SUPPRESS, add_help=False)
    for managed in (arguments.GENERATION, arguments.VECTORS):
        arguments.engine_arguments("cpu", managed).add_to(parser)
        known = {action.dest for action in parser._actions}
        assert managed.keys() - known <= {"config"}
        parser = ArgumentParser(argument_default=SUPPRESS, add_help=False)
