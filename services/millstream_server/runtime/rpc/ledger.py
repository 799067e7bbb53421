"""What callers hold of one thing, such as bytes: how much in sum, who holds most, and who pays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

from millstream_server.runtime.errors import OverloadedError, UnavailableError
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.telemetry import metrics

_RETRY_S = 1.0
"""Retry delay of a refused caller: a guess, since nothing here predicts when something ends."""
_SHARE_RETRY_S = 10.0
_BATCH = 64
"""Above the bound a part of 1/64 of all places is made free at once: finding out who holds most
takes a look at every caller."""


def overloaded(cause: str, why: str) -> OverloadedError:
    """Make the error of who is refused, or ends, for a bound, and count it by ``cause``."""
    metrics.ADMISSION_REFUSED.labels(cause).inc()
    return OverloadedError(why, retry_delay_s=jittered(_RETRY_S))


class Holder(Protocol):
    """What holds a part, such as a connection."""

    @property
    def caller_key(self) -> Hashable:
        """Whose it is: what the holders of one caller hold counts together."""
        ...


class Ledger:
    """Counts what is held, such as bytes, and bounds it. All calls come from one event loop.

    Above the most either the one that wants more is refused (`take`); or (`add`) the caller is
    found that holds most, of its holders the one that holds most, and of that a part is shed: a
    caller that holds little loses nothing while others hold more.
    """

    def __init__(
        self,
        most: int,
        shed: Callable[[Any], object] = lambda _: None,
        *,
        relief: float = 1.0,
        cause: str = "bytes",
        busy: str = "",
    ) -> None:
        """Allow ``most``; above it so much is shed that ``relief`` of it is kept.

        ``cause`` and ``busy`` are the label and the sentence of a refusal; the sentence may have
        the fields ``used``, ``most`` and ``amount``.
        """
        self.most = most
        self.used = 0
        """What all hold together."""
        self.peak = 0
        """The most that was added together since this was set."""
        self._kept = relief * most
        self.shed = shed
        """Frees a part of what a holder holds, by `remove`."""
        self._cause = cause
        self._busy = busy
        self._held: dict[Hashable, dict[Any, int]] = {}
        self._by_caller: dict[Hashable, int] = {}
        """What the holders of each caller hold together."""
        self._relieving = False

    # ---- the one that wants more is refused ------------------------------------------------------

    def take(self, amount: int) -> None:
        """Count more as held.

        Raises:
            OverloadedError: it would be too much.
        """
        if self.used + amount > self.most:
            why = self._busy.format(used=self.used, most=self.most, amount=amount)
            raise overloaded(self._cause, why)
        self.used += amount

    def give_back(self, amount: int) -> None:
        self.used -= amount

    # ---- who holds most pays ---------------------------------------------------------------------

    def of(self, holder: Holder) -> int:
        return self._held.get(holder.caller_key, {}).get(holder, 0)

    def add(self, holder: Holder, amount: int = 1) -> None:
        """Count more as held; parts may be shed, maybe also of this holder's."""
        key = holder.caller_key
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = {}
            self._by_caller[key] = 0
        held[holder] = held.get(holder, 0) + amount
        self._by_caller[key] += amount
        self.used += amount
        self.peak = max(self.peak, self.used)
        if self.used > self.most and not self._relieving:
            self._relieve()

    def remove(self, holder: Holder, amount: int = 1) -> None:
        """Count less as held, of what was added."""
        self.used -= amount
        key = holder.caller_key
        held = self._held.get(key)
        if held is None or holder not in held:
            return
        self._by_caller[key] -= amount
        held[holder] -= amount
        if held[holder] <= 0:
            del held[holder]
            if not held:  # callers can have any number of addresses
                del self._held[key], self._by_caller[key]

    def _relieve(self) -> None:
        self._relieving = True
        try:
            while self.used > self._kept and self._held:
                held = self._held[self._largest(self._by_caller)]
                holder, used = max(held, key=held.__getitem__), self.used
                self.shed(holder)
                if self.used >= used:  # it can free nothing now: it isn't asked again
                    amount = held[holder]
                    self.remove(holder, amount)
                    self.used += amount
        finally:
            self._relieving = False

    def _largest(self, callers: Any) -> Any:
        return max(callers, key=self._by_caller.__getitem__, default=None)


class Hold:
    """What one of many, such as a conversation, has taken from a ledger, until `close`."""

    __slots__ = ("_amount", "_closed", "_ledger")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._amount = 0
        self._closed = False

    def take(self, amount: int) -> None:
        self._ledger.take(amount)
        self._amount += amount

    def give_back(self, amount: int) -> None:
        """Hold less; no effect after `close`."""
        if not self._closed:
            self._ledger.give_back(amount)
            self._amount -= amount

    def close(self) -> None:
        """Give all back; may be called twice."""
        self.give_back(self._amount)
        self._closed = True


class Place:
    """One place that something open has, such as a connection. It starts unused."""

    __slots__ = ("_places", "caller_key", "give_up", "opened", "since_s")

    def __init__(self, places: Places, caller_key: Hashable, give_up: Callable[[], object]) -> None:
        self.caller_key = caller_key
        self.give_up = give_up
        self.since_s = time.monotonic()
        """Since when it is unused."""
        self.opened = False
        """Whether a caller is served on it; the owner of the places sets it."""
        self._places = places

    def mark_used(self) -> None:
        """Keep it: something happens on it."""
        self._places.unused_of(self).pop(self, None)

    def mark_unused(self) -> None:
        """Let it go, where places are short: nothing happens on it."""
        self.since_s = time.monotonic()
        if self._places.of(self):
            unused = self._places.unused_of(self)
            unused.pop(self, None)
            unused[self] = None

    def close(self) -> None:
        self.give_up()

    def free(self) -> None:
        """Give it back; may be called twice."""
        self._places.freed(self)


class Places(Ledger):
    """Bounds what is open, in sum and by caller: who holds most loses what it doesn't use.

    If all is used, the caller that holds most loses one to those that hold less.
    """

    def __init__(
        self,
        most: int,
        most_per_caller: int,
        *,
        patience_s: float = 0.0,
        emptied: Callable[[], None] = lambda: None,
    ) -> None:
        """Allow ``most`` places; only those unused for ``patience_s`` are taken away.

        ``emptied`` is called when the last place is given back.
        """
        super().__init__(most)
        self.most_per_caller = most_per_caller
        self._patience_s = patience_s
        self._emptied = emptied
        self._unused: dict[Hashable, dict[Place, None]] = {}
        """Of each caller; the one that is unused for longest is the first."""

    def open(self, caller_key: Hashable, give_up: Callable[[], object]) -> Place:
        """Open a place; ``give_up`` closes what has it. Ask `has_room` before."""
        place = Place(self, caller_key, give_up)
        self.add(place)
        self._unused.setdefault(caller_key, {})[place] = None
        return place

    def has_room(self, caller_key: Hashable) -> bool:
        """Return whether a caller may have one more place, after what had to be taken away."""
        held = self._by_caller.get(caller_key, 0)
        if held >= self.most_per_caller and not self._take_away(caller_key, 1):
            return False
        return self.used < self.most or self.make_room() or self._take_used(held)

    def make_room(self) -> bool:
        """Take unused places away from the caller who holds most of all that have some."""
        key = self._largest(key for key in self._unused if self._oldest(key))
        return key is not None and self._take_away(key, 1 + self.most // _BATCH)

    def all(self) -> list[Place]:
        return [place for held in self._held.values() for place in held]

    def unused_of(self, place: Place) -> dict[Place, None]:
        return self._unused.get(place.caller_key, {})

    def freed(self, place: Place) -> None:
        """Forget a place; may be called twice."""
        if not self.of(place):
            return
        self.remove(place)
        self.unused_of(place).pop(place, None)
        place.give_up = bool  # the old one keeps what had it in memory
        if place.caller_key not in self._held:
            del self._unused[place.caller_key]
        if not self.used:
            self._emptied()

    def _take_away(self, caller_key: Hashable, count: int) -> bool:
        taken = 0
        while taken < count and (place := self._oldest(caller_key)) is not None:
            self._close(place)
            taken += 1
        return taken > 0

    def _take_used(self, held: int) -> bool:
        """Take away what is in use, for a caller that holds ``held``: the newest of who holds most.

        Each connection of HTTP/1.1 that is used has one request, so all may be used at once.
        """
        key = self._largest(self._by_caller)
        if self._by_caller[key] <= held + 1 or len(self._unused[key]) == len(self._held[key]):
            return False
        place = next(place for place in reversed(self._held[key]) if place not in self._unused[key])
        self._close(place)
        return True

    def _close(self, place: Place) -> None:
        give_up = place.give_up
        self.freed(place)
        give_up()

    def _oldest(self, caller_key: Hashable) -> Place | None:
        first = next(iter(self._unused.get(caller_key, ())), None)
        if first is None or time.monotonic() - first.since_s < self._patience_s:
            return None
        return first


class Shares(Ledger):
    """Bounds streams in sum and by caller.

    A caller may open one more while it holds fewer than are free: alone it gets half of all, beside
    k others that take what they can one part in k + 2. So no limit by caller has to be chosen, and
    the first stream of a caller is refused only when all are taken.
    """

    def __init__(self, most: int, what: str) -> None:
        """Allow ``most`` in sum; ``what`` names the streams in the error."""
        super().__init__(most)
        self._what = what
        self._closed = ""

    @contextlib.contextmanager
    def share(self, call: Call) -> Iterator[None]:
        """Hold one while the block runs, of the handler of ``call``.

        Raises:
            UnavailableError: `close` was called.
            OverloadedError: too many are open, of this caller or in sum.
        """
        if self._closed:
            raise UnavailableError(self._closed)
        held = self._by_caller.get(call.caller_key, 0)
        if held >= self.most - self.used:
            raise OverloadedError(
                f"{self.used} {self._what} are open on this server, {held} of them yours; "
                f"it allows {self.most}, and one caller as many as are free",
                retry_delay_s=_SHARE_RETRY_S,
            )
        self.add(call)
        try:
            yield
        finally:
            self.remove(call)

    def close(self, why: str) -> None:
        """End all with UNAVAILABLE and refuse new ones: an open one would delay a server's stop."""
        self._closed = why
        for call in [call for held in self._held.values() for call in held]:
            call.fail(UnavailableError(why))
