"""Members in order of how long a new request waits there.

Sets of members are ints with one bit per member, as in `routing.prefix.index`. The least loaded
member of a set is found with one operation per level, whatever the number of members.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millstream_server.control.engine import WorkerDescription
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.kv_cache.hashing import Namespace, block_hashes
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import requests_at
from millstream_server.routing.prefix.index import DEFAULT_MAX_BLOCKS, PrefixIndex
from millstream_server.routing.workers import Candidate, Place, WorkerView, candidates_of, info_of
from millstream_server.runtime.telemetry.metrics import PREFIX_INDEX_BLOCKS, ROUTING_CACHED_TOKENS

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
        self._loads[member] = load
        level = min(int(_PER_DOUBLING * math.log2(1 + load / _FINEST)), _LEVELS - 1)
        known = self._at.get(member)
        if level != known:
            if known is not None:
                self._levels[known] ^= 1 << member
            self._levels[level] |= 1 << member
            self._at[member] = level

    def remove(self, member: int) -> None:
        del self._loads[member]
        self._levels[self._at.pop(member)] ^= 1 << member

    def load(self, member: int) -> float:
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


class CachedBy(NamedTuple):
    """Members that hold a prompt's beginning."""

    tokens: int
    """How much of it, without the last token: that one is always computed."""
    members: int
    """The members, as bits."""


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Who holds how much of one prompt."""

    cached: Sequence[CachedBy]
    """The most first; a member is in one of the sets at most."""
    hashes: dict[int, Sequence[int]]
    """The prompt's blocks, by block size."""

    def tokens(self, place: Place) -> int:
        bit = 1 << place.member if place.member >= 0 else 0
        return next((cached.tokens for cached in self.cached if cached.members & bit), 0)


_NOTHING = Overlaps((), {})


class ModelPrefixes:
    """One model's prefix caches, queues and places. All calls come from one event loop."""

    def __init__(
        self, model: str, max_blocks: int, now: Callable[[], float], rng: random.Random | None
    ) -> None:
        self._cached_tokens = ROUTING_CACHED_TOKENS.labels(model)
        self._blocks = PREFIX_INDEX_BLOCKS.labels(model)
        self.index = PrefixIndex(max_blocks, now)
        self.levels = LoadLevels(rng)
        self.places: dict[int, Candidate] = {}
        """By member."""
        self._most_running: dict[int, int] = {}
        self._block_sizes: dict[int, int] = {}
        """Members that tell of their blocks, by the tokens of a block."""
        self._last: tuple[RoutingRequest, Overlaps] | None = None

    @property
    def tells_kv(self) -> bool:
        return bool(self._block_sizes)

    def join(self, place: Candidate, engine: GeneratorInfo) -> None:
        """Give a place a number, and follow its load."""
        member = place.member = self.index.join()
        self.places[member] = place
        self._most_running[member] = max(engine.max_running_requests // max(engine.dp_size, 1), 1)
        if engine.tells_kv:
            size = engine.block_size
            self._block_sizes[size] = self._block_sizes.get(size, 0) | 1 << member
        self._follow_load(place)
        place.on_load = self._follow_load

    def leave(self, place: Candidate) -> None:
        member = place.member
        self.index.leave(member)
        self.levels.remove(member)
        del self.places[member], self._most_running[member]
        sizes = {size: members & ~(1 << member) for size, members in self._block_sizes.items()}
        self._block_sizes = {size: members for size, members in sizes.items() if members}
        place.leave_index()
        self._last = None
        self.count_blocks()

    def count_blocks(self) -> None:
        """Record the index's size, after events."""
        self._blocks.set(self.index.blocks)

    def overlaps(self, request: RoutingRequest) -> Overlaps:
        """Return who holds how much of a request's prompt.

        The legs and the choice of the way ask in turn for the same request, so the last result is
        kept.
        """
        last = self._last
        if last is not None and last[0] is request:
            return last[1]
        found = self._find(request) if self._block_sizes else _NOTHING
        self._last = request, found
        return found

    def sent(self, request: RoutingRequest, place: Candidate) -> int:
        """Note that a request's prompt is sent to a place (`PrefixIndex.expect`).

        Return how many of its tokens are probably cached there.
        """
        overlaps = self.overlaps(request)
        self._last = None
        cached = overlaps.tokens(place)
        self._cached_tokens.inc(cached)
        for size, hashes in overlaps.hashes.items():
            if self._block_sizes[size] >> place.member & 1:
                self.index.expect(place.member, hashes, -(-cached // size))
        return cached

    def _find(self, request: RoutingRequest) -> Overlaps:
        token_ids = request.token_ids
        if request.media_start is not None:
            token_ids = token_ids[: request.media_start]
        namespace = Namespace(request.adapter, request.cache_salt)
        cached: list[CachedBy] = []
        hashes: dict[int, Sequence[int]] = {}
        for size, members in self._block_sizes.items():
            hashes[size] = of_prompt = block_hashes(token_ids, size, namespace)
            for overlap in self.index.overlaps(of_prompt):
                tokens = min(overlap.blocks * size, len(request.token_ids) - 1)
                cached.append(CachedBy(tokens, overlap.members & members))
        if len(hashes) > 1:
            cached.sort(key=lambda by: -by.tokens)
        return Overlaps(cached, hashes)

    def _follow_load(self, place: Candidate) -> None:
        self.levels.set(place.member, waiting_tokens(place, self._most_running[place.member]))


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """A worker's places in one model's index."""

    prefixes: ModelPrefixes
    description: WorkerDescription
    places: Sequence[Candidate]


class Prefixes:
    """The prefix caches of all models."""

    def __init__(
        self,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        now: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """Start without workers; ``max_blocks`` holds for each model."""
        self._rng = rng
        self._max_blocks = max_blocks
        self._now = now
        self._models: dict[str, ModelPrefixes] = {}
        self._memberships: dict[WorkerView, Membership] = {}

    def of(self, model: str) -> ModelPrefixes:
        if (found := self._models.get(model)) is None:
            found = ModelPrefixes(model, self._max_blocks, self._now, self._rng)
            self._models[model] = found
        return found

    def admit(self, view: WorkerView, description: WorkerDescription) -> Membership | None:
        """Return a worker's places: the same object while the worker stays the same.

        None: it doesn't generate text. A worker that has changed loses its blocks.
        """
        known = self._memberships.get(view)
        if known and (
            known.description is description or _caches(known.description) == _caches(description)
        ):
            return known
        self.dismiss(view)
        engine = info_of(description, GeneratorInfo)
        if engine is None:
            return None
        prefixes = self.of(description.model)
        places = candidates_of(view, description)
        for place in places:
            prefixes.join(place, engine)
        made = self._memberships[view] = Membership(prefixes, description, places)
        return made

    def has(self, view: WorkerView, membership: Membership) -> bool:
        """Return whether these are still the worker's places."""
        return self._memberships.get(view) is membership

    def dismiss(self, view: WorkerView) -> None:
        known = self._memberships.pop(view, None)
        if known:
            for place in known.places:
                known.prefixes.leave(place)


def _caches(description: WorkerDescription) -> tuple[object, ...]:
    """Return what a worker's caches depend on; other facts may change meanwhile."""
    engine = info_of(description, GeneratorInfo)
    if engine is None:
        return ()
    return (description.model, engine.dp_start, engine.dp_size, engine.block_size, engine.tells_kv)
