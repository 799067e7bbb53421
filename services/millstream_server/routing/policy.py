"""How one worker is picked among those that can run a request: each is scored, the best is picked.

A policy gets only workers of the right model and role that accept requests (`routing.router`), of a
worker with several data-parallel ranks these, and where a request asks for what not all have, only
those that have it.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from millstream_server.control.engine import Role
from millstream_server.routing.candidates import Candidates
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.workers import Candidate, WorkerView
from millstream_server.runtime.errors import NoWorkerError

AFFINITY_SLACK = 8
"""A conversation stays with its worker while that has at most this many requests more."""

Scorer = Callable[[RoutingRequest, Candidate], float]
"""Returns how well a worker fits a request; higher is better."""


class RoutingPolicy(Protocol):
    """Picks where a request runs; it may have state: there is one per role."""

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        """Pick one of ``candidates``, in order of address; None: there is none."""
        ...


def requests_at(view: Candidate) -> int:
    """Count a worker's requests: ours in flight, or those in its last report if more."""
    load = view.load
    if load is None:
        return view.in_flight
    return max(view.in_flight, load.running_requests + load.queued_requests)


def score_by_session(request: RoutingRequest, view: Candidate) -> float:
    """Return 1 for a worker of the conversation's last turn, 0 for others."""
    return 1.0 if view.name in request.session else 0.0


def score_by_load(request: RoutingRequest, view: Candidate) -> float:
    """Score by the number of requests; the conversation's worker wins within `AFFINITY_SLACK`."""
    if view.name in request.session:
        # The half decides when the difference is exactly the slack.
        return AFFINITY_SLACK + 0.5 - requests_at(view)
    return -requests_at(view)


class BestInRotation:
    """The worker with the best score; equal ones in rotation."""

    def __init__(self, scorer: Scorer = score_by_load) -> None:
        self._scorer = scorer
        self._rotation = itertools.count()

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        scores = [self._scorer(request, view) for view in candidates]
        best = max(scores)
        if scores.count(best) == 1:
            return candidates[scores.index(best)]
        ties = [view for view, score in zip(candidates, scores, strict=True) if score == best]
        return ties[next(self._rotation) % len(ties)]


class BestOfTwo:
    """By load, the best of two random workers and the conversation's own.

    Several Processors then don't all choose the same worker, as they would with the best of all.
    M. Mitzenmacher, "The power of two choices in randomized load balancing" (2001).
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._draw = (rng or random.Random()).random  # noqa: S311 - no secret

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        count = len(candidates)
        if count <= 1:
            return candidates[0] if candidates else None
        first = int(self._draw() * count)
        second = int(self._draw() * (count - 1))
        drawn = [candidates[first], candidates[second + (second >= first)]]
        if request.session:
            drawn += [view for view in candidates if view.name in request.session]
        return max(drawn, key=lambda view: score_by_load(request, view))


class PolicyName(enum.Enum):
    """Policies by their names in settings; `routing.kv_aware` makes them."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    KV_AWARE = "kv_aware"


# ---- a role's workers ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleWorkers:
    """A model's workers of one role that accept requests, in order of address."""

    role: Role
    views: Sequence[WorkerView]
    places: Candidates
    """The workers, or their data-parallel ranks."""
    policy: RoutingPolicy
    absent: Callable[..., NoWorkerError]
    """Makes the error that the model has no worker of some roles."""

    def pick(self, request: RoutingRequest) -> Candidate:
        """Pick a place by the session key, if the request has one, or else by the policy.

        Raises:
            NoWorkerError: there is none.
        """
        place = self.policy.pick(request, self.places)
        if place is None:
            raise self.absent(self.role)
        if request.session_key and len(self.places) > 1:
            return self._home(request.session_key, place)
        return place

    def full(self) -> bool:
        return all(
            requests_at(view) >= view.description.engine.max_running_requests
            for view in self.views
            if view.description
        )

    def _home(self, key: str, other: Candidate) -> Candidate:
        """Return the key's place, or its next ones while it is clearly busier than ``other``."""
        most = requests_at(other) + AFFINITY_SLACK
        return next(place for place in self.places.ring.places(key) if requests_at(place) <= most)
