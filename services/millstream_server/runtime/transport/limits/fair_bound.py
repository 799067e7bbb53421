"""A bound on what may be open, in all and per caller: who holds most loses what it doesn't use."""

from __future__ import annotations

import time
from collections.abc import Callable

_BATCH = 64
"""Above the bound a part of 1/64 of it is made free at once: finding out who holds most takes a
look at every caller."""


class Place:
    """One place that something open has. It starts unused."""

    def __init__(self, bound: FairBound, key: str, give_up: Callable[[], object]) -> None:
        """Made by `FairBound.take`."""
        self.key = key
        self.give_up = give_up
        self.since_s = time.monotonic()
        """Since when it is unused."""
        self.opened = False
        """Whether a caller is served on it; the owner of the bound sets it."""
        self._bound = bound

    def use(self) -> None:
        """Keep it: something happens on it."""
        self._bound.holder(self.key).unused.pop(self, None)

    def rest(self) -> None:
        """Let it go, where places are short: nothing happens on it."""
        self.since_s = time.monotonic()
        holder = self._bound.holder(self.key)
        if self in holder.places:
            holder.unused.pop(self, None)
            holder.unused[self] = None

    def close(self) -> None:
        """Close what has it, in the way that is right now."""
        self.give_up()

    def free(self) -> None:
        """Give it back; may be called twice."""
        self._bound.freed(self)


class _Holder:
    """The places of one caller."""

    __slots__ = ("places", "unused")

    def __init__(self) -> None:
        self.places: set[Place] = set()
        self.unused: dict[Place, None] = {}
        """The one that is unused for longest is the first."""


_NOBODY = _Holder()


class FairBound:
    """Counts places by caller. All calls come from one event loop."""

    def __init__(
        self,
        most: int,
        most_per_key: int,
        *,
        patience_s: float = 0.0,
        emptied: Callable[[], None] = lambda: None,
    ) -> None:
        """Allow ``most`` places; only those unused for ``patience_s`` are taken away.

        ``emptied`` is called when the last place is given back.
        """
        self.most = most
        self.most_per_key = most_per_key
        self._patience_s = patience_s
        self._emptied = emptied
        self._holders: dict[str, _Holder] = {}
        self.count = 0
        self.peak = 0
        """The highest count since it was set."""

    def take(self, key: str, give_up: Callable[[], object]) -> Place:
        """Take a place; ``give_up`` closes what has it, when it is taken away for another."""
        place = Place(self, key, give_up)
        holder = self._holders.setdefault(key, _Holder())
        holder.places.add(place)
        holder.unused[place] = None
        self.count += 1
        self.peak = max(self.peak, self.count)
        return place

    def has_room(self, key: str) -> bool:
        """Return whether a caller may have one more place, after what had to be taken away."""
        if len(self.holder(key).places) >= self.most_per_key and not self._take_away(key, 1):
            return False
        return self.count < self.most or self.shed()

    def shed(self) -> bool:
        """Take unused places away from the caller who holds most of all that have some."""
        now_s = time.monotonic()
        most = max(
            (key for key, holder in self._holders.items() if self._oldest(holder, now_s)),
            key=lambda key: len(self._holders[key].places),
            default=None,
        )
        return most is not None and self._take_away(most, 1 + self.most // _BATCH)

    def all(self) -> list[Place]:
        """Return all places."""
        return [place for holder in self._holders.values() for place in holder.places]

    def holder(self, key: str) -> _Holder:
        """Return the places of a caller."""
        return self._holders.get(key, _NOBODY)

    def freed(self, place: Place) -> None:
        """Forget a place."""
        holder = self.holder(place.key)
        if place in holder.places:
            holder.places.remove(place)
            holder.unused.pop(place, None)
            place.give_up = _nothing  # keeps what had it in memory
            self.count -= 1
            if not holder.places:
                del self._holders[place.key]
            if not self.count:
                self._emptied()

    def _take_away(self, key: str, count: int) -> bool:
        now_s = time.monotonic()
        taken = 0
        while taken < count and (place := self._oldest(self.holder(key), now_s)) is not None:
            give_up = place.give_up
            self.freed(place)
            give_up()
            taken += 1
        return taken > 0

    def _oldest(self, holder: _Holder, now_s: float) -> Place | None:
        first = next(iter(holder.unused), None)
        if first is None or now_s - first.since_s < self._patience_s:
            return None
        return first


def _nothing() -> None:
    """Stand for what is closed."""
