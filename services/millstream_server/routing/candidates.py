"""The candidates of one role, with what policies derive from them once per change of workers."""

from __future__ import annotations

import functools
import hashlib
import struct
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

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


_POINTS = 32
"""Per place: the number of keys of a place differs by some 18 % from the mean."""
_UNPACK = struct.Struct(f">{_POINTS}Q").unpack


class SessionRing:
    """The ring of some candidates; made again when they change."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        """Place ``candidates`` on the ring."""
        owned = [
            (point, number)
            for number, place in enumerate(candidates)
            for point in _points(place.name)
        ]
        owned.sort()
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
