"""What a worker's plan says about the control of its engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream_server.control.abilities import NO_CONTROLS, EngineControls
from millstream_server.control.adapters import LoraAdapter
from millstream_server.worker.control.directories import AllowedDirectories


def default_profile_dir() -> Path:
    """Return the directory of profiles where none is set."""
    return Path(tempfile.gettempdir()) / "millstream-profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """What operators may do, and where."""

    directories: AllowedDirectories = field(default_factory=lambda: AllowedDirectories(()))
    """Where weights and adapters may be."""
    max_weights_bytes: int = 4 << 30
    """Most bytes of tensors that an update may send."""
    profile_dir: Path = field(default_factory=default_profile_dir)
    operation_limit_s: float = 1800.0
    """An engine that has been changed for so long is watched by the canary again: longer than the
    largest models take to load."""
    weights_record: Path | None = None
    """File that notes updates from disk for a restart (`weights_record.WeightsRecord`)."""
    model_path: Path | None = None
    """The model that the worker was started with."""


def _no_adapters(_: Any) -> tuple[LoraAdapter, ...]:
    return ()


def _same_info(info: Any, _: tuple[LoraAdapter, ...]) -> Any:
    return info


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlan:
    """An engine's controls; the default: it has none, so operators can only drain the worker."""

    controls: Callable[[], EngineControls] = lambda: NO_CONTROLS
    """Returns them once the engine has started."""
    adapters: Callable[[Any], tuple[LoraAdapter, ...]] = _no_adapters
    """Reads the loaded adapters from the engine's info."""
    with_adapters: Callable[[Any, tuple[LoraAdapter, ...]], Any] = _same_info
    """Returns the engine's info with other adapters."""
    options: ControlOptions = field(default_factory=ControlOptions)
