"""Settings that several engine adapters read, and an adapter's other inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_server.engines.base import Role
from millstream_server.runtime.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonEngineSettings:
    """Settings of any engine that generates; 0 leaves a limit to the engine."""

    max_running_requests: int = setting(0, help="most requests at once; 0: the engine decides")
    context_length: int = setting(0, help="most tokens of prompt and completion; 0: the model's")
    bootstrap_host: str = setting(
        "127.0.0.1",
        help="this worker's address as its hand-off peers reach it: KV sockets bind there, and a "
        "prefill worker's goes into tickets",
    )
    bootstrap_port: int = setting(8998, help="prefill: port of the KV bootstrap")
    transfer_timeout_s: float = setting(30.0, help="longest wait for the other leg of a hand-off")


@dataclass(frozen=True, slots=True, kw_only=True)
class DllmSettings:
    """Settings of an engine that runs a diffusion language model."""

    dllm_algorithm: str = setting(
        "", help="how blocks are denoised, such as LowConfidence; required with SGLang"
    )
    dllm_config: Path | None = setting(
        None, help="YAML file for the algorithm, such as `threshold: 0.9` or `block_size: 4`"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """An adapter's inputs besides its own settings."""

    role: Role
    model_path: Path | None
    model_name: str
    """The model's name in requests."""
    common: CommonEngineSettings
    metrics: bool
    """Whether this process has a metrics endpoint."""
    otlp_endpoint: str
    """Collector of spans; empty: none."""
    dllm: DllmSettings | None = None
    """In the role DIFFUSION."""
