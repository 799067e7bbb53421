"""Members in order of how long a new request waits there.

Sets of members are ints with one bit per member, as in `routing.prefix.index`. The least loaded
member of a set is found with one operation per level, whatever the number of members.
"""

from __future__ import annotations

import math
import random

from millstream_server.routing.policy import requests_at
from millstream_server.routing.workers import Candidate

REQUEST_TOKENS = 32
"""A request that runs or waits delays a new one like this many prompt tokens: it takes part in
every step. It also lets workers with equal queues share the requests."""
FULL_TOKENS = 1 << 17
"""What a new request waits where all places are taken, until an answer ends: more than nearly every
prompt takes, since nobody knows when that is."""
_FINEST = 64.0
_PER_DOUBLING = 4
_LEVELS = 80
"""Up to 64 x 2**20 tokens, each level 19 % above the one before."""


def waiting_tokens(place: Candidate, most_running: int) -> float:
    """Return how long a new request waits at a place, as prompt tokens that it could compute.

    ``most_running`` is the number of requests that run there at once. Reports are up to a second
    old; what we have sent ourselves is known at once.
    """
    requests = requests_at(place)
    tokens = max(place.pending_tokens, place.queued_tokens) + REQUEST_TOKENS * requests
    return tokens + FULL_TOKENS if requests >= most_running else tokens


class LoadLevels:
    """Members by load, in tokens; levels are about logarithmic."""

    def __init__(self, rng: random.Random | None = None) -> None:
        """Start empty; ``rng`` chooses where the rotation among equal members begins."""
        self._levels = [0] * _LEVELS
        self._loads: dict[int, float] = {}
        self._at: dict[int, int] = {}
        self._rng = rng or random.Random()  # noqa: S311 - no secret
        self._next: int | None = None
        """Where the rotation goes on; None: it hasn't begun."""

    def set(self, member: int, load: float) -> None:
        """Set a member's load, in tokens."""
        self._loads[member] = load
        level = min(int(_PER_DOUBLING * math.log2(1 + load / _FINEST)), _LEVELS - 1)
        known = self._at.get(member)
        if level != known:
            if known is not None:
                self._levels[known] ^= 1 << member
            self._levels[level] |= 1 << member
            self._at[member] = level

    def remove(self, member: int) -> None:
        """Remove a member."""
        del self._loads[member]
        self._levels[self._at.pop(member)] ^= 1 << member

    def load(self, member: int) -> float:
        """Return a member's load."""
        return self._loads[member]

    def least(self, members: int) -> int:
        """Return a member of a set, on the lowest level that has one; in rotation.

        Raises:
            ValueError: no member of the set has a load.
        """
        for level in self._levels:
            if found := level & members:
                break
        else:
            raise ValueError("no member of the set has a load")
        start = self._next
        if start is None:  # several Processors that began at the same one would all choose alike
            start = self._rng.randrange(found.bit_length())
        if later := found >> start:
            chosen = start + (later & -later).bit_length() - 1
        else:
            chosen = (found & -found).bit_length() - 1
        self._next = chosen + 1
        return chosen
