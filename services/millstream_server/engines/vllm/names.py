"""The names of vLLM that this adapter uses: most are no public interface, so releases change them.

`tests/integration/vllm_engine/test_names.py` says which of them a vLLM lacks. Methods and functions
are in `MEMBERS`, what objects set on themselves in `ATTRIBUTES`; the test has the fields of
messages, and digests of the code that is wrapped or imitated.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream_server.runtime.errors import EngineFailedError

PACKAGE = "vllm"
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
CLASSES: Mapping[str, str] = {
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "EngineCoreClient": "vllm.v1.engine.core_client",
    "EngineCoreRequest": "vllm.v1.engine",
    "FinishReason": "vllm.v1.engine",
    "Executor": "vllm.v1.executor",
    "SamplingParams": "vllm.sampling_params",
    "RequestOutputKind": "vllm.sampling_params",
    "StructuredOutputsParams": "vllm.sampling_params",
    "PoolingParams": "vllm.pooling_params",
    "LoRARequest": "vllm.lora.request",
    "KVTransferConfig": "vllm.config",
    "KVEventsConfig": "vllm.config",
    "MultiModalKwargsItems": "vllm.multimodal.inputs",
    "MultiModalFeatureSpec": "vllm.multimodal.inputs",
    "PlaceholderRange": "vllm.multimodal.inputs",
}
MEMBERS: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.engine.core_client.EngineCoreClient": ("make_async_mp_client",),
    "vllm.v1.engine.core_client.AsyncMPClient": (
        *("get_output_async", "add_request_async", "abort_requests_async"),
        *("is_scheduler_paused_async", "pause_scheduler_async", "resume_scheduler_async"),
        *("reset_prefix_cache_async", "reset_mm_cache_async", "reset_encoder_cache_async"),
        *(
            "collective_rpc_async",
            "set_weight_version_async",
            "get_weight_version_async",
            "profile_async",
        ),
        *("add_lora_async", "remove_lora_async", "sleep_async", "wake_up_async", "shutdown"),
    ),
    "vllm.v1.engine.core.EngineCoreProc": ("run_engine_core",),
    "vllm.v1.core.sched.scheduler.Scheduler": ("_update_from_kv_xfer_finished",),
    f"{_NIXL}.push_worker.NixlPushConnectorWorker": (*("_do_start_push_kv", "_ensure_handshake"),),
    f"{_NIXL}.base_worker": ("nixl_agent_config",),
    "nixl._api.nixl_thread_sync_t": ("NIXL_THREAD_SYNC_STRICT",),
    "vllm.platforms.cpu.CpuPlatform": ("discover_numa_topology",),
    "vllm.distributed.kv_transfer": ("get_kv_transfer_group",),
    "vllm.envs": ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
}
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.engine.core_client.AsyncMPClient": ("outputs_queue", "resources"),
    "vllm.v1.engine.utils.CoreEngineProcManager": ("processes",),
    "vllm.v1.core.sched.scheduler.Scheduler": ("requests",),
    f"{_NIXL}.connector.NixlPushConnector": ("connector_worker",),
    f"{_NIXL}.push_worker.NixlPushConnectorWorker": (
        *("_recving_metadata", "_recving_transfers", "_reg_send_inbox", "_push_writer_wake"),
        *("_sending_transfers", "_sending_transfers_lock", "_pending_d_registrations"),
        *("_deferred_push_inbox", "_reqs_to_process", "vllm_config", "engine_id"),
    ),
}
"""Set in the source of the class or of one that it extends."""


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM's classes, by their names there."""

    AsyncEngineArgs: Any
    EngineCoreClient: Any
    EngineCoreRequest: Any
    FinishReason: Any
    Executor: Any
    SamplingParams: Any
    RequestOutputKind: Any
    StructuredOutputsParams: Any
    PoolingParams: Any
    LoRARequest: Any
    KVTransferConfig: Any
    KVEventsConfig: Any
    MultiModalKwargsItems: Any
    MultiModalFeatureSpec: Any
    PlaceholderRange: Any
    version: str


def load() -> Vllm:
    """Import vLLM.

    Raises:
        EngineFailedError: it isn't installed, or is one whose names differ.
    """
    try:
        found = {name: getattr(importlib.import_module(at), name) for name, at in CLASSES.items()}
        version = str(importlib.import_module(PACKAGE).__version__)
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise EngineFailedError(f"vLLM can't be imported: {error}.") from error
        raise EngineFailedError(
            "vLLM isn't installed in this Python: run `make setup-vllm` in a checkout and start "
            "the worker with .venv-vllm/bin/python, or take the image worker-vllm."
        ) from error
    except (ImportError, AttributeError) as error:
        raise EngineFailedError(
            f"This vLLM isn't the one that Millstream's adapter is for, 0.32: {error}."
        ) from error
    return Vllm(**found, version=version)
