"""Recording what an engine does."""

from __future__ import annotations

import enum
from collections.abc import Collection
from pathlib import Path
from typing import Protocol


class ProfileActivity(enum.Enum):
    """What a profile records; the names are the contract's."""

    CPU = "cpu"
    GPU = "gpu"
    MEMORY = "memory"


class ProfileControl(Protocol):
    """All calls come from one event loop, one at a time. Requests may run."""

    async def start_profile(
        self, directory: Path, activities: Collection[ProfileActivity], steps: int
    ) -> None:
        """Record into new files in ``directory``, which exists.

        Empty ``activities``: CPU and, where there is one, GPU. ``steps`` above 0: stop by itself
        after so many. None is recorded now.

        Raises:
            UnsupportedFeatureError: the engine can't record an activity.
        """
        ...

    async def stop_profile(self) -> None:
        """Write the files, unless it has stopped by itself; returns when they are complete."""
        ...
