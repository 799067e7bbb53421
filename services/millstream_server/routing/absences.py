"""Since when a model has no worker of a role, and so when a refused client should come back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from millstream_server.engines.base import Role
from millstream_server.runtime.errors import NoWorkerError
from millstream_server.runtime.retry_delay import jittered

_LEAST_DELAY_S = 1.0
_MOST_DELAY_S = 15.0


def retry_delay_s(lasted_s: float) -> float:
    """Return the delay after something that has lasted so long: about as long again, 1 to 15 s.

    How long a worker takes to start isn't known: some seconds or many minutes. So a client that
    keeps to the delays comes back soon after a short absence, and rarely during a long one.
    """
    return max(_LEAST_DELAY_S, jittered(min(lasted_s, _MOST_DELAY_S)))


class Absences:
    """Which roles of which models have workers, and when the last one of a role left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without workers."""
        self._clock = clock
        self._began_s = clock()
        self._serving: set[tuple[str, Role]] = set()
        self._left_s: dict[tuple[str, Role], float] = {}

    def changed(self, serving: Collection[tuple[str, Role]]) -> None:
        """Take the models and roles of all workers that accept requests now."""
        now_s = self._clock()
        self._left_s |= dict.fromkeys(self._serving.difference(serving), now_s)
        self._serving = set(serving)

    def error(self, model: str, *roles: Role) -> NoWorkerError:
        """Make the error that a model has no worker of a role.

        Of several ``roles``, any of which would do, it names the one that left last.
        """
        role = max(roles, key=lambda role: self._left_s.get((model, role), -math.inf))
        message = f"no {role.value} worker for this model is connected"
        if (model, role) in self._serving:  # but not for this request
            return NoWorkerError(f"{message}; retry in a moment", retry_delay_s=_LEAST_DELAY_S)
        left_s = self._left_s.get((model, role))
        lasted_s = self._clock() - (self._began_s if left_s is None else left_s)
        why = (
            f"none has been since this server started {lasted_s:.0f} s ago"
            if left_s is None
            else f"the last one left {lasted_s:.0f} s ago, and may be starting again"
        )
        return NoWorkerError(
            f"{message}: {why}; retry later", retry_delay_s=retry_delay_s(lasted_s)
        )
