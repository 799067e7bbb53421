"""Stopping an engine's steps for a while; and emptying its prefix cache."""

from __future__ import annotations

import enum
from typing import Protocol


class PauseMode(enum.Enum):
    """What becomes of running requests; the names are the contract's."""

    IN_PLACE = "in_place"
    """They keep their KV cache and go on later."""
    RETRACT = "retract"
    """They give their KV cache back and compute it again later."""
    ABORT = "abort"
    """They fail with `WorkerPausedError`."""


class PauseControl(Protocol):
    """All calls come from one event loop, one at a time."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop the steps; requests are accepted, wait, and can be aborted. It isn't paused yet.

        Raises:
            UnsupportedFeatureError: the engine doesn't have this mode.
        """
        ...

    async def go_on(self) -> None:
        """Go on with the steps. It is paused."""
        ...


class CacheControl(Protocol):
    """Empties the prefix cache."""

    async def flush_cache(self) -> None:
        """Empty the prefix cache. No request is open.

        Raises:
            EngineBusyError: the engine still has requests.
        """
        ...
