"""Settings of a generating worker for what operators do with its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from millstream_server.runtime.settings import setting
from millstream_server.worker.control.directories import AllowedDirectories
from millstream_server.worker.control.plan import ControlOptions, default_profile_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Settings of EngineControlService."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "operation_limit_s": "leave it out: an operation is watched again after 1800 s",
    }

    weights_dirs: tuple[str, ...] = setting(
        (),
        help="directories, comma-separated, from which weights and LoRA adapters may be loaded "
        "while the worker runs, beside the model's own; empty: those beside the model's",
    )
    max_weights_bytes: int = setting(
        4 << 30,
        help="most bytes of tensors that UpdateWeights takes in a call; they are held in the "
        "host's memory until the engine has them",
    )
    weights_record: Path | None = setting(
        None,
        help="file that notes the last UpdateWeights from disk, so that a worker that restarts "
        "loads it again; this worker's own, where a restart finds it; empty: a restarted worker "
        "has the model's own weights",
    )
    profile_dir: Path | None = setting(
        None,
        help="directory for profiles; empty: millstream-profiles in the system's temporary one",
    )

    def options(self, model_path: Path | None) -> ControlOptions:
        """Return what operators may do with a model of this path."""
        return ControlOptions(
            directories=AllowedDirectories.of_model(map(Path, self.weights_dirs), model_path),
            max_weights_bytes=self.max_weights_bytes,
            profile_dir=self.profile_dir or default_profile_dir(),
            weights_record=self.weights_record,
            model_path=model_path,
        )
