"""Decides whether a request runs on one worker or is handed off from prefill to decode."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from millstream_server.routing.model_workers import ModelWorkers
from millstream_server.routing.plan import RoutingRequest

DEFAULT_MIN_TOKENS = 512
"""Prompt tokens that an engine computes within about one step of its running answers."""


class HandoffDecider(Protocol):
    """Decides for models that have prefill, decode and aggregated workers.

    Not called where a model's workers allow only one of the two.
    """

    @property
    def constant(self) -> bool | None:
        """The decision if it is the same for every request; else None.

        Workers that are then never used don't count for capacity or readiness.
        """
        ...

    def hands_off(self, request: RoutingRequest, workers: ModelWorkers, uncached: int) -> bool:
        """Return whether the request should run on two workers, prefill and decode.

        ``uncached`` is how many prompt tokens the aggregated worker that would run it, by the
        policy, had to compute.
        """
        ...


class AlwaysHandOff:
    """Uses prefill and decode workers where there are both."""

    constant = True

    def hands_off(self, request: RoutingRequest, workers: ModelWorkers, uncached: int) -> bool:
        """Return True."""
        return True


class NeverHandOff:
    """Uses aggregated workers where there are any."""

    constant = False

    def hands_off(self, request: RoutingRequest, workers: ModelWorkers, uncached: int) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True, slots=True)
class ByUncachedLength:
    """Hands off prompts that would hold up an aggregated worker's running answers.

    That is, those of which it had to compute ``min_tokens`` or more. What the prefill workers hold
    doesn't count: a short rest costs the aggregated worker less than a hand-off. While all workers
    of one way are full, requests go the other one.
    """

    min_tokens: int = DEFAULT_MIN_TOKENS
    constant = None

    def hands_off(self, request: RoutingRequest, workers: ModelWorkers, uncached: int) -> bool:
        """See `HandoffDecider.hands_off`."""
        if workers.prefill.full() or workers.decode.full():
            return False
        return uncached >= self.min_tokens or workers.aggregated.full()


class HandoffMode(enum.Enum):
    """When to hand off, by the names in settings."""

    ALWAYS = "always"
    NEVER = "never"
    AUTO = "auto"


def make_decider(mode: HandoffMode, min_tokens: int = DEFAULT_MIN_TOKENS) -> HandoffDecider:
    """Make the decider of this name; ``min_tokens`` is for AUTO."""
    match mode:
        case HandoffMode.ALWAYS:
            return AlwaysHandOff()
        case HandoffMode.NEVER:
            return NeverHandOff()
        case HandoffMode.AUTO:
            return ByUncachedLength(min_tokens)
