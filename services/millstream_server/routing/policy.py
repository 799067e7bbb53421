"""Picking one worker among those that could take a request."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import Protocol, TypeVar

from millstream_server.engines.base import EngineLoad

AFFINITY_SLACK = 8
"""A conversation stays with its worker while that has so many requests more than the best."""


class Candidate(Protocol):
    """What a policy looks at (`worker_stream.client.WorkerConnection`)."""

    address: str
    in_flight: int
    load: EngineLoad | None


C = TypeVar("C", bound=Candidate)


class PolicyName(enum.Enum):
    """Names as in settings."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"


class Policy(Protocol):
    """Picks among at least one candidate, in order of address; called from one event loop."""

    def pick(self, candidates: Sequence[C], preferred: C | None) -> C:
        """Answer one of ``candidates``: ``preferred``, the conversation's last, if no worse."""
        ...


class RoundRobin:
    """Each in its turn; a conversation stays where it was."""

    def __init__(self) -> None:
        """Start with the first."""
        self._turn = itertools.count()

    def pick(self, candidates: Sequence[C], preferred: C | None) -> C:
        """Answer the preferred one if it is there, else the next in order of address."""
        if preferred is not None and preferred in candidates:
            return preferred
        return candidates[next(self._turn) % len(candidates)]


class LeastLoaded:
    """The one with the fewest requests, ours and, as far as reported, others'."""

    def __init__(self) -> None:
        """Start with no ties broken."""
        self._turn = itertools.count()

    def pick(self, candidates: Sequence[C], preferred: C | None) -> C:
        """Answer the preferred one if it's near the least loaded, else the least loaded."""
        least = min(map(requests, candidates))
        if (
            preferred is not None
            and preferred in candidates
            and requests(preferred) <= least + AFFINITY_SLACK
        ):
            return preferred
        ties = [c for c in candidates if requests(c) == least]
        return ties[next(self._turn) % len(ties)]


def requests(candidate: Candidate) -> int:
    """Count requests at a worker: what we sent and know of, or what it reported if that's more."""
    load = candidate.load
    return max(candidate.in_flight, load.running_requests + load.queued_requests if load else 0)


def make_policy(name: PolicyName) -> Policy:
    """Make a policy from its name."""
    return RoundRobin() if name is PolicyName.ROUND_ROBIN else LeastLoaded()
