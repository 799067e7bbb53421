"""How one worker is picked among those that can run a request: filter, score, pick.

A policy gets only workers of the right model and role that accept requests (`routing.router`); of a
worker with several data-parallel ranks it gets these.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millstream_server.routing.request import RoutingRequest
from millstream_server.routing.workers import Candidate

AFFINITY_SLACK = 8
"""A conversation stays with its worker while that has at most this many requests more."""


class RoutingPolicy(Protocol):
    """Picks where a request runs."""

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        """Pick one of ``candidates``, in order of address; None: none of them can run it."""
        ...


class Filter(Protocol):
    """Excludes workers."""

    def __call__(self, request: RoutingRequest, view: Candidate, /) -> bool:
        """Return whether the worker may run the request."""
        ...


class Scorer(Protocol):
    """Rates workers."""

    def __call__(self, request: RoutingRequest, view: Candidate, /) -> float:
        """Return how well the worker fits the request; higher is better."""
        ...


class Picker(Protocol):
    """Picks one of several workers. It calls the scorer itself, so it need not score all."""

    def pick(
        self, request: RoutingRequest, candidates: Sequence[Candidate], scorer: Scorer
    ) -> Candidate:
        """Return one of the candidates: at least two, in order of address."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A `RoutingPolicy` of filters, a scorer and a picker, which may have state: one per role."""

    scorer: Scorer
    picker: Picker
    filters: tuple[Filter, ...] = ()

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        """Pick one of ``candidates``, in order of address; None if the filters exclude all."""
        if self.filters:
            candidates = [
                view for view in candidates if all(keep(request, view) for keep in self.filters)
            ]
        if len(candidates) > 1:
            return self.picker.pick(request, candidates, self.scorer)
        return candidates[0] if candidates else None


# ---- scorers -------------------------------------------------------------------------------------


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


def weighted(*parts: tuple[float, Scorer]) -> Scorer:
    """Return a scorer: the weighted sum of others."""

    def score(request: RoutingRequest, view: Candidate) -> float:
        return sum(weight * scorer(request, view) for weight, scorer in parts)

    return score


# ---- pickers -------------------------------------------------------------------------------------


class BestInRotation:
    """The worker with the best score; equal ones in rotation."""

    def __init__(self) -> None:
        """Start with the first."""
        self._rotation = itertools.count()

    def pick(
        self, request: RoutingRequest, candidates: Sequence[Candidate], scorer: Scorer
    ) -> Candidate:
        """See `Picker.pick`."""
        scores = [scorer(request, view) for view in candidates]
        best = max(scores)
        if scores.count(best) == 1:
            return candidates[scores.index(best)]
        ties = [view for view, score in zip(candidates, scores, strict=True) if score == best]
        return ties[next(self._rotation) % len(ties)]


class BestOfTwo:
    """The best of two random workers and the conversation's own.

    Several Processors then don't all choose the same worker, as they would with the best of all.
    M. Mitzenmacher, "The power of two choices in randomized load balancing" (2001).
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        """Draw from ``rng``."""
        self._draw = (rng or random.Random()).random  # noqa: S311 - no secret

    def pick(
        self, request: RoutingRequest, candidates: Sequence[Candidate], scorer: Scorer
    ) -> Candidate:
        """See `Picker.pick`."""
        count = len(candidates)
        first = int(self._draw() * count)
        second = int(self._draw() * (count - 1))
        drawn = [candidates[first], candidates[second + (second >= first)]]
        if request.session:
            drawn += [view for view in candidates if view.name in request.session]
        return max(drawn, key=lambda view: scorer(request, view))


# ---- names ---------------------------------------------------------------------------------------


class PolicyName(enum.Enum):
    """Policies by their names in settings; `routing.policies` makes them."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    KV_AWARE = "kv_aware"
