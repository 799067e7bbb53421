"""The names of SGLang that we use, and the CPU stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from millstream_server.engines.sglang import arguments, dllm
from millstream_server.engines.sglang.control.operations import _IN_PROGRESS, _NOT_IN_PROGRESS
from millstream_server.engines.sglang.control.sources import UNTOUCHED
from tests.support.engines.sglang_requests import (
    child,
)

pytestmark = [
    pytest.mark.sglang,
    # Importing SGLang takes seconds, and half a minute on a busy machine.
    pytest.mark.timeout(240),
]

_BATCH_HANDLER = "75a0538d10930b8697e046797c5bf950432dcd85674d1ec9fc129c6b86d8fc83"
"""SHA-256 of the source that `requests.batches` was written against."""


async def test_the_names_we_use_are_there() -> None:
    """Fails first, and by name, when SGLang moves on."""
    names = await child("tests.support.engines.bare_sglang", "names")
    assert names["version"] == "0.5.23"
    assert set(names["async_generate"]) >= {
        "input_ids", "sampling_params", "rid", "stream", "return_logprob", "top_logprobs_num",
        "logprob_start_len", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "routed_dp_rank", "disagg_prefill_dp_rank", "external_trace_header",
    }  # fmt: skip
    assert set(names["server_args"]) >= {*arguments.GENERATION} - {"config"}
    assert set(names["server_args"]) >= {
        "model_path", "device", "dtype", "log_level", "host", "skip_tokenizer_init",
        "incremental_streaming_output", "enable_deterministic_inference", "max_total_tokens",
        "max_running_requests", "context_length", "disaggregation_mode", "sleep_on_idle",
        "disaggregation_transfer_backend", "disaggregation_bootstrap_port", "page_size",
        "disaggregation_decode_retraction_backup", "attention_backend", "sampling_backend",
        "disable_cuda_graph", "dp_size", "weight_version", "enable_metrics", "served_model_name",
        "enable_trace", "otlp_traces_endpoint", "dllm_algorithm", "dllm_algorithm_config",
        "dllm_fdfo",
    }  # fmt: skip
    assert set(names["sampling"]) >= {
        "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
        "presence_penalty", "repetition_penalty", "ignore_eos", "min_new_tokens",
        "stop_token_ids", "sampling_seed", "logit_bias", "json_schema", "regex", "ebnf",
    }  # fmt: skip
    assert len(names["engine_attributes"]) == 4
    assert {"shutdown", "get_all_child_pids", "async_generate"} <= set(names["engine_methods"])
    assert {"configure_logger", "kill_process_tree"} <= set(names["engine_module"])
    assert {"handle_loop", "abort_request", "get_loads"} <= set(names["manager_methods"])
    assert "dispatched" in names["request_state"]
    assert "if self.event_loop is not None:\n            return" in names["handle_loop_guard"]
    assert set(names["load"]) >= {
        "num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_running_requests",
        "disaggregation", "queues",
    }  # fmt: skip
    assert "prefill_inflight_queue_reqs" in names["load_disaggregation"]
    assert "grammar" in names["load_queues"]
    assert set(names["dllm_algorithms"]) == set(dllm.ALGORITHMS)
    assert all(f'"{name}": {{' in names["dllm_config"] for name in dllm.ARCHITECTURES)
    assert names["dllm_config"].count('"mask_id":') == len(dllm.ARCHITECTURES)
    assert all(f'"{name}"' in names["schedule_policy"] for name in dllm.ENVIRONMENT)
    assert names["fake_host"] == "2.2.2.2"
    _check_control_names(names)
    _check_batch_names(names)
    assert set(names["environment"]) >= {
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    }


def _check_control_names(names: dict[str, Any]) -> None:
    """Check what operators' operations rely on."""
    assert set(names["manager_methods"]) >= {
        "update_weights_from_disk", "update_weights_from_tensor", "begin_weight_update",
        "end_weight_update", "update_weights_from_distributed", "init_weights_update_group",
        "destroy_weights_update_group", "update_weights_from_ipc", "release_memory_occupation",
        "resume_memory_occupation", "pause_generation", "continue_generation", "start_profile",
        "stop_profile", "load_lora_adapter", "unload_lora_adapter",
    }  # fmt: skip
    fields = names["control_messages"]
    needed = {
        "UpdateWeightFromDiskReqInput": {"model_path", "weight_version", "load_format"},
        "UpdateWeightsFromTensorReqInput": {
            "serialized_named_tensors", "flush_cache", "weight_version",
        },
        "UpdateWeightsFromDistributedReqInput": {
            "names", "dtypes", "shapes", "group_name", "weight_version",
        },
        "InitWeightsUpdateGroupReqInput": {
            "master_address", "master_port", "rank_offset", "world_size", "group_name", "backend",
        },
        "DestroyWeightsUpdateGroupReqInput": {"group_name"},
        "BeginWeightUpdateReqInput": set(),
        "EndWeightUpdateReqInput": set(),
        "UpdateWeightsFromIPCReqInput": {"zmq_handles", "weight_version"},
        "ReleaseMemoryOccupationReqInput": {"tags"},
        "ResumeMemoryOccupationReqInput": {"tags"},
        "PauseGenerationReqInput": {"mode"},
        "ContinueGenerationReqInput": set(),
        "FlushCacheReqInput": set(),
        "LoadLoRAAdapterReqInput": {"lora_name", "lora_path"},
        "UnloadLoRAAdapterReqInput": {"lora_name"},
        "ProfileReq": {"output_dir", "activities", "num_steps", "profile_prefix"},
    }  # fmt: skip
    assert not {name: more for name, each in needed.items() if (more := each - {*fields[name]})}
    for attribute in ("flush_cache_communicator", "pending_lora_unloads", "lora_ref_cache"):
        assert f"self.{attribute}" in names["manager_source"], attribute
    texts = names["control_texts"]
    for words in (*UNTOUCHED, _IN_PROGRESS, _NOT_IN_PROGRESS):
        assert words in texts, words


def _check_batch_names(names: dict[str, Any]) -> None:
    """Check what `engines.sglang.requests.batches` relies on."""
    needed = {
        "rids", "output_ids", "finished_reasons", "completion_tokens", "dp_ranks",
        "input_token_logprobs_val", "output_token_logprobs_val", "output_token_logprobs_idx",
        "output_top_logprobs_val", "output_top_logprobs_idx",
    }  # fmt: skip
    assert not {name: more for name, each in names["batches"].items() if (more := needed - {*each})}
    assert set(names["request_state"]) >= {
        "out_list", "obj", "time_stats", "ttft_observed", "last_completion_tokens", "output_ids",
    }  # fmt: skip
    assert set(names["times"]) >= {
        "first_token_time", "last_time", "set_first_token_time", "set_last_time",
        "set_response_sent_to_client_time",
    }  # fmt: skip
    assert names["collect_metrics"] == ["self", "state", "recv_obj", "i"]
    assert names["observe"] == ["self", "labels", "internval", "num_new_tokens"]
    assert "await self._handle_batch_output(recv_obj)" in names["handle_loop"]
    for attribute in ("enable_metrics", "enable_priority_scheduling", "metrics_collector"):
        assert f"self.{attribute}" in names["manager_source"], attribute
    assert "if rid.startswith(HEALTH_CHECK_RID_PREFIX):" in names["manager_source"]
    assert names["batch_handler"] == _BATCH_HANDLER, (
        "SGLang's TokenizerManager._handle_batch_output has changed. Read it: what it does for a "
        "request that goes on must also be done in engines/sglang/requests/batches.py; then "
        "change the digest here."
    )


def _python(program: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if "SGLANG" not in key}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_importing_the_adapter_changes_nothing() -> None:
    program = """
import os, sys
before = dict(os.environ), list(sys.path), list(sys.meta_path)
import millstream_server.engines.sglang.cpu as stand_in
import millstream_server.engines.sglang.engine
assert (dict(os.environ), list(sys.path), list(sys.meta_path)) == before
assert not stand_in.is_active()
assert not {"sglang", "torch", "triton", "sgl_kernel"} & set(sys.modules)
for name in ("sgl_kernel", "triton", "millstream_sglang_cpu_plugin"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(name)
"""
    done = _python(program)
    assert done.returncode == 0, done.stderr


def test_the_stand_in_refuses_a_machine_with_a_gpu() -> None:
    program = """
import pathlib, sys
from millstream_server.engines import torch_on_cpu
from millstream_server.engines.sglang import cpu as sglang_cpu
torch_on_cpu._GPU_DEVICES = (pathlib.Path("/dev/null"),)
try:
    sglang_cpu.activate()
except RuntimeError as error:
    assert "GPU" in str(error)
    assert not sglang_cpu.is_active()
else:
    raise AssertionError
"""
    done = _python(program)
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_is_missing_fails_loudly() -> None:
    program = """
from millstream_server.engines.sglang import cpu as sglang_cpu
sglang_cpu.activate()
import triton, triton.language as tl, sgl_kernel
@triton.jit
def kernel(x: tl.constexpr): pass
for launch in (lambda: kernel[(1,)](1), lambda: sgl_kernel.awq_dequantize()):
    try:
        launch()
    except NotImplementedError:
        continue
    raise AssertionError
"""
    done = _python(program)
    assert done.returncode == 0, done.stderr


def test_a_patch_that_no_longer_fits_ends_the_process() -> None:
    program = """
from millstream_server.engines.sglang import cpu as sglang_cpu
sglang_cpu.activate()
import sglang.srt.batch_invariant_ops as changed
del changed.enable_batch_invariant_mode
try:
    sglang_cpu.patch_sglang()
except RuntimeError as error:
    assert "enable_batch_invariant_mode" in str(error)
else:
    raise AssertionError
from sglang.srt.plugins import load_plugins  # what SGLang's own processes call
load_plugins()
"""
    done = _python(program)
    assert done.returncode == 1
    assert "cannot be applied" in done.stderr


def test_a_diffusion_patch_that_no_longer_fits_ends_the_process() -> None:
    program = """
from millstream_server.engines.sglang import cpu as sglang_cpu
sglang_cpu.activate()
import sglang.multimodal_gen.runtime.layers.layernorm as changed
changed._NormScaleShift.forward_cpu = changed._NormScaleShift.forward_native
try:
    sglang_cpu.patch_diffusion()
except RuntimeError as error:
    assert "_NormScaleShift.forward_cpu" in str(error)
else:
    raise AssertionError
from sglang.multimodal_gen.runtime.platforms.plugins import load_plugins
load_plugins()  # what SGLang's own processes call
"""
    done = _python(program)
    assert done.returncode == 1
    assert "cannot be applied" in done.stderr
