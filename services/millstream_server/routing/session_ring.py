"""Where a client's session key sends its requests, the same in every Processor.

Consistent hashing: D. Karger et al., "Consistent hashing and random trees" (1997). Each place has
several points on a ring; a key belongs to the first point after its own. When a place comes or
goes, only the keys before its points move.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from bisect import bisect
from collections.abc import Iterator, Sequence

from millstream_server.routing.workers import Candidate

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
