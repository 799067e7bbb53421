"""Settings of every worker, of any ability."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings(ServiceSettings):
    """Settings of a `worker.host.WorkerHost` and its process."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(HostSettings):
    """Settings of a worker process: those of its host, and the model."""

    model_path: Path | None = setting(
        None, help="model directory (weights and config); not needed by the simulated engine"
    )
    model_name: str = setting(
        "", help="name the model is served under; empty: the directory's name"
    )

    @property
    def served_name(self) -> str:
        """The name under which the model is served."""
        return self.model_name or (self.model_path.name if self.model_path else "simulated")
