"""The candidates of one role, with what policies derive from them once per change of workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from millstream_server.routing.session_ring import SessionRing
from millstream_server.routing.workers import Candidate, WorkerView, candidates_of


class Candidates(tuple[Candidate, ...]):  # noqa: SLOT001 - the cached properties need a dict
    """Workers, or their ranks, in order of address. It never changes."""

    @classmethod
    def of(cls, views: Iterable[WorkerView]) -> Candidates:
        """Collect the candidates of workers that accept requests."""
        return cls(
            place
            for view in views
            if view.description
            for place in candidates_of(view, view.description)
        )

    @cached_property
    def members(self) -> int:
        """Their numbers in their model's `PrefixIndex`, as bits."""
        return _members(self)

    @cached_property
    def ring(self) -> SessionRing:
        """The ring for session keys."""
        return SessionRing(self)


def members_of(candidates: Sequence[Candidate]) -> int:
    """Return candidates' numbers in their model's `PrefixIndex`, as bits."""
    return candidates.members if isinstance(candidates, Candidates) else _members(candidates)


def _members(candidates: Iterable[Candidate]) -> int:
    return sum(1 << place.member for place in candidates if place.member >= 0)
