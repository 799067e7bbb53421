"""The candidates of one role, with what policies derive from them once per change of workers.

Where a role has none: since when, and so when a refused client should come back.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
import time
from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property

from millstream_server.control.engine import Role
from millstream_server.routing.workers import Candidate, WorkerView, candidates_of
from millstream_server.runtime.errors import NoWorkerError
from millstream_server.runtime.retry_delay import jittered

_POINTS = 32
"""Per place: the number of keys of a place differs by some 18 % from the mean."""
_UNPACK = struct.Struct(f">{_POINTS}Q").unpack


class SessionRing:
    """The ring of some candidates; made again when they change."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        owned = sorted(
            (point, number)
            for number, place in enumerate(candidates)
            for point in _points(place.name)
        )
        self._points = [point for point, _ in owned]
        self._owners = [candidates[number] for _, number in owned]

    def places(self, key: str) -> Iterator[Candidate]:
        """Yield the candidates in the order in which the key prefers them; some more than once."""
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        start = bisect(self._points, int.from_bytes(digest))
        for at in range(start, start + len(self._owners)):
            yield self._owners[at % len(self._owners)]


@functools.lru_cache(8192)
def _points(name: str) -> tuple[int, ...]:
    return _UNPACK(hashlib.shake_128(name.encode()).digest(8 * _POINTS))


def _members(candidates: Iterable[Candidate]) -> int:
    return sum(1 << place.member for place in candidates if place.member >= 0)


class Candidates(tuple[Candidate, ...]):  # noqa: SLOT001 - the cached properties need a dict
    """Workers, or their ranks, in order of address. It never changes."""

    @classmethod
    def of(cls, views: Iterable[WorkerView]) -> Candidates:
        return cls(
            place
            for view in views
            if view.description
            for place in candidates_of(view, view.description)
        )

    members = cached_property(_members)
    ring = cached_property(SessionRing)
    """For session keys."""


def members_of(candidates: Sequence[Candidate]) -> int:
    """Return candidates' numbers in their model's `PrefixIndex`, as bits."""
    return candidates.members if isinstance(candidates, Candidates) else _members(candidates)


# ---- no candidates -------------------------------------------------------------------------------

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

    def __init__(self, clock: Callable[[], float] = time.monotonic, round_s: float = 0.0) -> None:
        """``round_s``: how long discovery takes at most to find a worker; 0: it finds no other."""
        self._clock = clock
        self._round_s = round_s
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
        error = NoWorkerError(
            f"{message}: {why}; retry later", retry_delay_s=retry_delay_s(lasted_s)
        )
        if left_s is not None:
            error.may_come_s = self._round_s - lasted_s
        return error
