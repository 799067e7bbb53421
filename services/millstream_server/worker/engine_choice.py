"""From settings to an engine."""

from __future__ import annotations

import json
from typing import Protocol

from millstream_server.engines.base import Engine, Probeable, Role
from millstream_server.engines.sglang_engine import SglangEngine, SglangEngineConfig
from millstream_server.engines.simulated import SimulatedConfig, SimulatedEngine
from millstream_server.runtime.settings import SettingsError
from millstream_server.worker.settings import EngineKind, WorkerSettings


class WorkerEngine(Engine, Probeable, Protocol):
    """What a worker process runs."""


def model_name(settings: WorkerSettings) -> str:
    """Name the model that is served."""
    return settings.model_name or (settings.model_path.name if settings.model_path else "simulated")


def make_engine(settings: WorkerSettings, role: Role) -> WorkerEngine:
    """Build the engine that ``settings`` ask for; nothing is loaded yet.

    Raises:
        SettingsError: the settings contradict each other.
    """
    if settings.engine is EngineKind.SIMULATED:
        return SimulatedEngine(_simulated(settings, role))
    if settings.model_path is None:
        raise SettingsError("--model-path is required with --engine sglang: a model directory")
    if not (settings.model_path / "config.json").is_file():
        raise SettingsError(f"--model-path {settings.model_path}: there is no config.json in it")
    return SglangEngine(_sglang(settings, role))


def _simulated(settings: WorkerSettings, role: Role) -> SimulatedConfig:
    limits = {
        "context_length": settings.context_length,
        "max_running_requests": settings.max_running_requests,
    }
    return SimulatedConfig(
        role=role,
        vocab_size=settings.simulated_vocab_size,
        load_s=settings.simulated_load_s,
        step_s=settings.simulated_step_s,
        prefill_s_per_token=settings.simulated_prefill_s_per_token,
        bootstrap_host=settings.bootstrap_host,
        bootstrap_port=settings.bootstrap_port,
        transfer_timeout_s=settings.transfer_timeout_s,
        **{name: value for name, value in limits.items() if value},
    )


def _sglang(settings: WorkerSettings, role: Role) -> SglangEngineConfig:
    try:
        extra = json.loads(settings.engine_args or "{}")
    except ValueError as error:
        raise SettingsError(f"--engine-args is not a JSON object: {error}") from error
    if not isinstance(extra, dict):
        raise SettingsError("--engine-args is not a JSON object")
    return SglangEngineConfig(
        model_path=str(settings.model_path),
        role=role,
        device=settings.device,
        dtype=settings.dtype,
        bootstrap_host=settings.bootstrap_host,
        bootstrap_port=settings.bootstrap_port,
        transfer_backend=settings.transfer_backend,
        transfer_timeout_s=settings.transfer_timeout_s,
        max_total_tokens=settings.max_total_tokens or None,
        max_running_requests=settings.max_running_requests or None,
        context_length=settings.context_length or None,
        deterministic=settings.deterministic,
        engine_tokenizer=settings.engine_tokenizer,
        served_model_name=model_name(settings),
        metrics=bool(settings.metrics_listen),
        otlp_endpoint=settings.otlp_endpoint,
        warm_up_timeout_s=settings.warm_up_timeout_s,
        extra=extra,
        log_level=settings.engine_log_level,
    )
