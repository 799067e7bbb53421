"""Which operations a worker's engine has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from millstream_server.control.operations import EngineControls
from millstream_server.runtime.errors import (
    EngineBusyError,
    InvalidRequestError,
    InvalidWeightsError,
    OperationConflictError,
    UnsupportedFeatureError,
)

T = TypeVar("T")

REFUSALS = (InvalidRequestError, InvalidWeightsError, EngineBusyError, OperationConflictError)
"""An engine that raises one of these has not been changed."""
_WHAT = {
    "Pause": "pause",
    "Continue": "pause",
    "ReleaseMemory": "release memory",
    "ResumeMemory": "release memory",
    "UpdateWeights": "replace its weights",
    "FlushCache": "empty its prefix cache",
    "StartProfile": "record profiles",
    "StopProfile": "record profiles",
    "LoadLora": "load LoRA adapters",
    "UnloadLora": "load LoRA adapters",
    "ListLoras": "load LoRA adapters",
}


class SupportedControls:
    """The controls of an engine that has started."""

    def __init__(self, controls: Callable[[], EngineControls], ready: Callable[[], object]) -> None:
        """``ready`` raises `UnavailableError` while the model is being loaded."""
        self._controls = controls
        self._ready = ready

    def require(self, operation: str, part: Callable[[EngineControls], T | None]) -> T:
        """Return the part of the engine's controls that an operation needs.

        Raises:
            UnsupportedFeatureError: the engine doesn't have it.
            UnavailableError: the model is being loaded.
        """
        self._ready()
        found = part(self._controls())
        if found is None:
            raise UnsupportedFeatureError(
                f"{operation}: this worker's engine can't {_WHAT[operation]}, at least not with "
                "the settings it was started with"
            )
        return found

    def names(self) -> tuple[str, ...]:
        """Return the operations that the engine has, by the names of their RPCs."""
        controls = self._controls()
        groups = (
            (True, ("Drain", "Undrain")),
            (controls.pause, ("Pause", "Continue")),
            (controls.memory, ("ReleaseMemory", "ResumeMemory")),
            (controls.weights, ("UpdateWeights",)),
            (controls.cache, ("FlushCache",)),
            (controls.profile, ("StartProfile", "StopProfile")),
            (controls.adapters, ("LoadLora", "UnloadLora", "ListLoras")),
        )
        return tuple(name for has, names in groups if has for name in names)
