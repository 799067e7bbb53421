"""What operators may do with a worker: what its plan says of the engine's control, its settings."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from millstream_server.control.operations import NO_CONTROLS, EngineControls
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.settings import setting

_SETTING = "--weights-dirs"


class AllowedDirectories:
    """Paths below some directories; symbolic links are followed first."""

    def __init__(self, directories: Iterable[Path]) -> None:
        self._directories = tuple(directories)

    @classmethod
    def of_model(cls, directories: Iterable[Path], model_path: Path | None) -> AllowedDirectories:
        """Allow ``directories`` and the model's own; without any, also those beside the model's.

        The model's own is always allowed, so that an operator can go back to its first weights.
        Where it is in the root directory, as in a container, it is allowed alone.
        """
        given = tuple(directories)
        if model_path is None:
            return cls(given)
        model = model_path.resolve()
        if given:
            return cls((*given, model))
        beside = model.parent
        return cls((model if beside == beside.parent else beside,))

    async def resolve(self, field: str, text: str) -> Path:
        """Return the directory that a caller names.

        Raises:
            InvalidRequestError: it isn't below one of them. The error doesn't say what exists.
        """
        if not text.startswith("/"):
            raise InvalidRequestError.of(field, "must be an absolute path on the worker's machine")
        found = await asyncio.to_thread(self._resolve, text)
        if found is None:
            raise InvalidRequestError.of(
                field, f"must be below a directory that the worker's {_SETTING} allows"
            )
        return found

    def _resolve(self, text: str) -> Path | None:
        try:
            found = Path(text).resolve()
            allowed = any(found.is_relative_to(d.resolve()) for d in self._directories)
        except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL character
            return None
        return found if allowed else None


def _default_profile_dir() -> Path:
    return Path(tempfile.gettempdir()) / "millstream-profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlan:
    """What operators may do with an engine, and where; the default: drain the worker, no more."""

    controls: Callable[[], EngineControls] = lambda: NO_CONTROLS
    """Returns them once the engine has started."""
    directories: AllowedDirectories = field(default_factory=lambda: AllowedDirectories(()))
    """Where weights and adapters may be."""
    max_weights_bytes: int = 4 << 30
    """Most bytes of tensors that an update may send."""
    profile_dir: Path = field(default_factory=_default_profile_dir)
    operation_limit_s: float = 1800.0
    """An engine that has been changed for so long is watched by the canary again: longer than the
    largest models take to load."""
    weights_record: Path | None = None
    """File that notes updates from disk for a restart (`weights_record.WeightsRecord`)."""
    model_path: Path | None = None
    """The model that the worker was started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Settings of EngineControlService."""

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

    def plan(self, model_path: Path | None) -> ControlPlan:
        """Return what operators may do with a model of this path; its controls are missing."""
        return ControlPlan(
            directories=AllowedDirectories.of_model(map(Path, self.weights_dirs), model_path),
            max_weights_bytes=self.max_weights_bytes,
            profile_dir=self.profile_dir or _default_profile_dir(),
            weights_record=self.weights_record,
            model_path=model_path,
        )
