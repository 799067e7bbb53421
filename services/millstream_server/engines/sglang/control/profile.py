"""Records what SGLang's schedulers do."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from millstream_server.control.operations import ProfileActivity
from millstream_server.engines.sglang.control.controlled import ControlledEngine
from millstream_server.runtime.errors import (
    InternalError,
    OperationConflictError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_NAMES = {
    ProfileActivity.CPU: "CPU",
    ProfileActivity.GPU: "GPU",
    ProfileActivity.MEMORY: "MEM",
}
_IN_PROGRESS = "already in progress"
_NOT_IN_PROGRESS = "not in progress"
"""In SGLang's messages; a test compares them."""


class SglangProfile:
    """See `control.operations.ProfileControl`."""

    def __init__(self, engine: ControlledEngine) -> None:
        """Nothing is recorded."""
        self._engine = engine

    async def start_profile(
        self, directory: Path, activities: Collection[ProfileActivity], steps: int
    ) -> None:
        """See `ProfileControl.start_profile`."""
        engine = self._engine
        on_gpu = engine.config.resolved_device() == "cuda"
        if not on_gpu and (wrong := set(activities) - {ProfileActivity.CPU}):
            names = ", ".join(sorted(activity.value for activity in wrong))
            raise UnsupportedFeatureError(
                f"This engine runs on a CPU and can't record {names}; it records cpu."
            )
        chosen = list(activities) or [ProfileActivity.CPU, *([ProfileActivity.GPU] * on_gpu)]
        message = engine.messages.ProfileReq(
            output_dir=str(directory),
            activities=[_NAMES[activity] for activity in chosen],
            num_steps=steps or None,
            profile_prefix="sglang",
        )
        try:
            await engine.call(engine.manager.start_profile(message))
        except RuntimeError as error:
            if _IN_PROGRESS in str(error):
                raise OperationConflictError("A profile is being recorded already.") from error
            raise _failed(error) from error

    async def stop_profile(self) -> None:
        """See `ProfileControl.stop_profile`."""
        engine = self._engine
        try:
            await engine.call(engine.manager.stop_profile())
        except RuntimeError as error:
            if _NOT_IN_PROGRESS not in str(error):  # it has stopped by itself
                raise _failed(error) from error


def _failed(error: RuntimeError) -> InternalError:
    log.error("SGLang's profiler failed", error=error)
    return InternalError("The engine's profiler failed; the worker's log has the cause.")
