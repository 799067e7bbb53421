"""Settings of a worker process."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millstream_server.runtime.service_settings import ServiceSettings
from millstream_server.runtime.settings import setting


class EngineKind(enum.Enum):
    """Which engine answers."""

    SGLANG = "sglang"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    """Read by `python -m millstream_server.prefill` and `python -m millstream_server.decode`."""

    model_path: Path | None = setting(
        None, help="model directory (weights and config); not needed by the simulated engine"
    )
    model_name: str = setting(
        "", help="name the model is served under; empty: the directory's name"
    )
    engine: EngineKind = setting(EngineKind.SGLANG, help="sglang or simulated")
    device: Literal["auto", "cuda", "cpu"] = setting("auto", help="auto, cuda or cpu")
    dtype: str = setting("auto", help="auto, bfloat16, float16 or float32")
    max_total_tokens: int = setting(0, help="KV cache size in tokens; 0: what fits")
    max_running_requests: int = setting(0, help="most requests at once; 0: the engine decides")
    context_length: int = setting(0, help="most tokens of prompt and completion; 0: the model's")
    deterministic: bool = setting(
        default=False,
        help="deterministic inference; turns SamplingParams.seed on, costs some speed",
    )
    engine_tokenizer: bool = setting(
        default=False, help="give the engine a tokenizer; turns min_new_tokens and constraints on"
    )
    bootstrap_host: str = setting(
        "127.0.0.1",
        help="this worker's address as its hand-off peers reach it: KV sockets bind there, and a "
        "prefill worker's goes into tickets",
    )
    bootstrap_port: int = setting(8998, help="prefill: port of the KV bootstrap")
    transfer_backend: str = setting("nixl", help="how KV moves: nixl or mooncake")
    transfer_timeout_s: float = setting(30.0, help="longest wait for the other leg of a hand-off")
    engine_args: str = setting("", help="further SGLang ServerArgs, as a JSON object")
    warm_up_timeout_s: float = setting(120.0, help="longest warm-up before the start fails")
    ticket_key: str = setting(
        "", help="hex key, 32 bytes or more, that signs hand-off tickets", secret=True
    )
    simulated_load_s: float = setting(0.0, help="simulated: time to load the model")
    simulated_step_s: float = setting(0.0, help="simulated: time of a decode step")
    simulated_prefill_s_per_token: float = setting(0.0, help="simulated: prefill time per token")
    simulated_vocab_size: int = setting(32000, help="simulated: vocabulary size")
    canary_interval_s: float = setting(
        5.0, help="an engine that was silent so long is tried with a canary; 0: never"
    )
    canary_timeout_s: float = setting(
        8.0, help="longest wait for a canary before the worker turns NOT_SERVING"
    )
    stuck_limit_s: float = setting(
        300.0,
        help="an engine that stays stuck so long is given up: its requests fail and the worker "
        "exits with code 1, to be started anew; 0: never",
    )
    max_open_requests: int = setting(
        0, help="most requests at once, running and queued; 0: four times what the engine runs"
    )
    max_open_tokens: int = setting(
        0, help="most prompt tokens of open requests; 0: four times what the KV cache holds"
    )
    engine_log_level: str = setting("warning", help="log level of SGLang, which is chatty at info")
