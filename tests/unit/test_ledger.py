"""The ledger: who wants too much is refused, or who holds most pays, and nobody else."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.rpc.ledger import Hold, Ledger, Places, Shares
from millstream_server.runtime.telemetry import metrics


class Connection:
    def __init__(self, caller_key: str) -> None:
        self.caller_key = caller_key


class Held:
    """Connections that shed 10 at a time."""

    def __init__(self, most: int, relief: float = 0.95) -> None:
        self.shed: list[Connection] = []
        self.ledger = Ledger(most, self._shed, relief=relief)

    def _shed(self, connection: Connection) -> None:
        self.shed.append(connection)
        self.ledger.remove(connection, min(10, self.ledger.of(connection)))


# ---- who holds most pays -------------------------------------------------------------------------


def test_below_the_bound_nobody_pays() -> None:
    held, one = Held(100), Connection("a")
    held.ledger.add(one, 100)
    assert (held.shed, held.ledger.used) == ([], 100)


def test_the_caller_that_holds_most_pays_until_there_is_room() -> None:
    held, greedy, modest = Held(100), Connection("greedy"), Connection("modest")
    held.ledger.add(greedy, 80)
    held.ledger.add(modest, 21)  # the one that comes last isn't the one that pays
    assert held.shed == [greedy]
    assert [held.ledger.of(each) for each in (greedy, modest)] == [70, 21]
    assert (held.ledger.used, held.ledger.peak) == (91, 101)


def test_connections_of_one_caller_count_together() -> None:
    held, modest = Held(100), Connection("modest")
    several = [Connection("greedy") for _ in range(4)]
    held.ledger.add(modest, 30)
    for amount, connection in zip((15, 25, 20, 15), several, strict=True):
        held.ledger.add(connection, amount)
    assert held.shed == [several[1]]
    assert held.ledger.of(modest) == 30


def test_alone_the_caller_pays_itself_and_what_was_given_back_is_forgotten() -> None:
    held, one = Held(50), Connection("a")
    held.ledger.add(one, 60)
    assert (held.shed, held.ledger.used) == ([one, one], 40)
    held.ledger.remove(one, 40)
    assert (held.ledger.used, held.ledger.of(one)) == (0, 0)
    assert not held.ledger._held
    assert not held.ledger._by_caller


def test_who_can_free_nothing_is_asked_once_and_then_the_next() -> None:
    asked: list[Connection] = []
    ledger = Ledger(10, asked.append)
    stuck, other = Connection("stuck"), Connection("other")
    ledger.add(other, 4)
    ledger.add(stuck, 7)
    assert (asked, ledger.used) == ([stuck, other], 11)
    ledger.remove(stuck, 7)
    ledger.remove(other, 4)
    assert ledger.used == 0


def test_without_relief_only_what_is_too_much_is_shed() -> None:
    held, one = Held(40, relief=1.0), Connection("a")
    for _ in range(6):
        held.ledger.add(one, 10)
    assert (len(held.shed), held.ledger.used) == (2, 40)


# ---- who wants too much is refused ---------------------------------------------------------------


def _refused(cause: str) -> float:
    counted: float = metrics.ADMISSION_REFUSED.labels(cause)._value.get()
    return counted


def test_what_would_be_too_much_is_refused_with_the_ledgers_sentence() -> None:
    ledger = Ledger(10, cause="media", busy="{used} of {most} are used, {amount} too many")
    before = _refused("media")
    ledger.take(8)
    with pytest.raises(OverloadedError, match="8 of 10 are used, 3 too many") as refusal:
        ledger.take(3)
    assert 0.5 <= (refusal.value.retry_delay_s or 0) <= 2
    assert _refused("media") == before + 1
    ledger.give_back(8)
    ledger.take(10)


def test_what_one_has_taken_is_given_back_once() -> None:
    ledger = Ledger(10)
    hold, other = Hold(ledger), Hold(ledger)
    other.take(1)
    hold.take(4)
    hold.give_back(1)
    with pytest.raises(OverloadedError):
        hold.take(7)
    hold.close()
    hold.close()
    hold.give_back(2)
    assert ledger.used == 1


# ---- places: what isn't used is closed for others ------------------------------------------------


class Open:
    """Opens places, and notes which are closed for others."""

    def __init__(self, most: int, most_per_caller: int, patience_s: float = 0.0) -> None:
        self.closed: list[str] = []
        self.emptied = 0
        self.places = Places(most, most_per_caller, patience_s=patience_s, emptied=self._note_empty)

    def _note_empty(self) -> None:
        self.emptied += 1

    def open(self, name: str) -> bool:
        """Open a place of the caller that the name begins with; return whether there was room."""
        if not self.places.has_room(name[0]):
            return False
        self.places.open(name[0], lambda: self.closed.append(name))
        return True


def test_who_holds_most_loses_the_place_that_is_unused_for_longest() -> None:
    it = Open(4, 4)
    assert all(it.open(name) for name in ("b1", "a1", "a2", "a3"))
    used, rested = it.places.all()[1:3]
    used.mark_used()
    rested.mark_used()
    rested.mark_unused()  # for shorter than a3
    assert it.open("c1")
    assert it.closed == ["a3"]
    assert it.places.used == 4


def test_a_place_that_is_used_goes_to_callers_that_hold_less() -> None:
    it = Open(4, 4)
    assert all(it.open(name) for name in ("a1", "a2", "b1", "a3"))
    for place in it.places.all():
        place.mark_used()
    assert it.open("c1")
    it.places.all()[-1].mark_used()
    assert not it.open("b2")
    assert not it.open("a4")
    assert it.closed == ["a3"]


def test_what_is_young_is_not_taken_away() -> None:
    patient = Open(3, 3, patience_s=60)
    assert all(patient.open(name) for name in ("a1", "a2", "a3"))
    assert not patient.open("b1")
    assert not patient.closed


def test_a_caller_has_so_many_places_of_its_own() -> None:
    it = Open(10, 2)
    assert it.open("b1")
    assert all(it.open(name) for name in ("a1", "a2", "a3"))
    assert it.closed == ["a1"]


def test_the_last_place_that_is_given_back_is_told_and_nothing_is_kept() -> None:
    it = Open(2, 2)
    assert it.open("a1")
    assert it.open("b1")
    for place in it.places.all():
        place.free()
        place.free()
        place.mark_unused()
    assert (it.emptied, it.places.used, it.places.peak) == (1, 0, 2)
    assert not it.places._unused
    assert not it.closed


# ---- shares --------------------------------------------------------------------------------------


def _of(key: str) -> Any:
    return Connection(key)  # of a call only this is looked at


def _take_all(shares: Shares, keys: list[str], stack: contextlib.ExitStack) -> dict[str, int]:
    """Let callers take turns until each is refused; return what each holds."""
    held = dict.fromkeys(keys, 0)
    refused: set[str] = set()
    while refused != set(keys):
        for key in keys:
            try:
                stack.enter_context(shares.share(_of(key)))
            except OverloadedError:
                refused.add(key)
            else:
                held[key] += 1
    return held


def test_one_caller_gets_half_and_others_still_find_room() -> None:
    shares = Shares(1000, "streams")
    with contextlib.ExitStack() as stack:
        assert _take_all(shares, ["greedy"], stack) == {"greedy": 500}
        assert _take_all(shares, ["second"], stack) == {"second": 250}
        with shares.share(_of("normal")):
            assert shares.used == 751
    assert shares.used == 0
    assert not shares._held


def test_greedy_callers_together_leave_a_part() -> None:
    shares = Shares(1000, "streams")
    with contextlib.ExitStack() as stack:
        held = _take_all(shares, [f"caller{i}" for i in range(9)], stack)
        assert set(held.values()) <= {99, 100, 101}
        assert 95 <= 1000 - shares.used <= 105


def test_many_callers_can_take_all_and_then_the_first_stream_is_refused() -> None:
    shares = Shares(3, "streams")
    with contextlib.ExitStack() as stack:
        for key in "abc":
            stack.enter_context(shares.share(_of(key)))
        with pytest.raises(OverloadedError, match="3 streams are open on this server, 0 of them"):
            stack.enter_context(shares.share(_of("d")))
        assert set(shares._held) == {"a", "b", "c"}
    with shares.share(_of("d")):
        assert shares.used == 1
