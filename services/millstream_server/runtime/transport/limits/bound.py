"""A bound on what connections hold together; above it, who holds most pays first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_RELIEF = 0.95
"""Above the bound so much of it is kept: the search for who holds most is paid once for many."""


class Holder(Protocol):
    """A connection."""

    caller_key: str
    """Who pays: several connections may be of one caller."""


H = TypeVar("H", bound=Holder)


class Bound(Generic[H]):
    """Bounds one thing, such as bytes, in sum over all connections.

    Above the bound the caller is found that holds most, of its connections the one that holds most,
    and of that a part is shed: a caller that holds little loses nothing while others hold more.
    """

    def __init__(self, most: int, shed: Callable[[H], bool], *, relief: float = _RELIEF) -> None:
        """Allow ``most``; ``shed`` frees a part of what one holds, by `remove`; False: it can't.

        Above the bound ``relief`` of it is kept.
        """
        self._kept = relief * most
        self.used = 0
        """What all hold together."""
        self._most = most
        self._shed = shed
        self._held: dict[str, dict[H, int]] = {}
        self._by_caller: dict[str, int] = {}
        """What each caller's connections hold together."""
        self._relieving = False

    def of(self, holder: H) -> int:
        """Return what one holds."""
        return self._held.get(holder.caller_key, {}).get(holder, 0)

    def add(self, holder: H, amount: int) -> None:
        """Count more as held; parts may be shed, maybe also of this holder's."""
        key = holder.caller_key
        mine = self._held.setdefault(key, {})
        mine[holder] = mine.get(holder, 0) + amount
        self._by_caller[key] = self._by_caller.get(key, 0) + amount
        self.used += amount
        if self.used > self._most and not self._relieving:
            self._relieve()

    def remove(self, holder: H, amount: int) -> None:
        """Count less as held."""
        self.used -= amount
        key = holder.caller_key
        mine = self._held.get(key)
        if mine is None:
            return
        self._by_caller[key] -= amount
        left = mine.get(holder, 0) - amount
        if left > 0:
            mine[holder] = left
            return
        mine.pop(holder, None)
        if not mine:
            del self._held[key], self._by_caller[key]

    def _relieve(self) -> None:
        self._relieving = True
        try:
            while self.used > self._kept and self._held:
                most = self._held[max(self._by_caller, key=self._by_caller.__getitem__)]
                if not self._shed(max(most, key=most.__getitem__)):
                    return
        finally:
            self._relieving = False
