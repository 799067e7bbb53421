"""A connection whose frames take more than its share of the loop is read later."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream_server.runtime.transport.intake import TURN_S, RateLimit, Work, WorkShare


def test_what_is_saved_up_costs_no_pause() -> None:
    share = WorkShare()
    work = Work(share, 0.0)
    assert work.took(0.019, 0.0, 0.0) == 0
    Work(share, 0.0).took(0.001, 0.0002, 9.9)
    assert work.took(0.05, 0.0, 10.0) == 0
    assert work.took(0.0, 0.049 / 0.4, 10.0) == 0  # 0.1 s at most is saved up in ten seconds
    assert work.took(0.0, 0.02 / 0.4, 10.0) > 0


def test_the_only_caller_is_no_neighbour_of_itself() -> None:
    """Else its pauses, after each of which it is within its share, would never end."""
    work = Work(WorkShare(), 0.0)
    assert [work.took(0.01, 0.01, at / 100) for at in range(1000)] == [0.0] * 1000


def _with_a_neighbour() -> WorkShare:
    """Let a connection be served that takes little."""
    share = WorkShare()
    Work(share, 0.0).took(0.001, 0.0002, 0.0)
    return share


def test_without_neighbours_there_is_no_pause() -> None:
    share = _with_a_neighbour()
    work = Work(share, 0.0)
    assert work.took(0.0, 0.6, 0.5) > 0
    assert work.took(0.0, 0.6, 1.6) == 0  # the neighbour was served more than a second ago
    assert share.above == 1


def test_above_the_share_the_pause_brings_it_back() -> None:
    share = _with_a_neighbour()
    work = Work(share, 0.0)
    pause_s = work.took(0.04, 0.0, 0.0)  # 0.02 s too much, at half of the loop's time
    assert pause_s == pytest.approx(0.04)
    assert share.above == 1
    assert work.took(0.0, 0.0, pause_s + 0.001) == 0
    assert share.above == 0


def test_those_above_their_share_divide_it() -> None:
    share = _with_a_neighbour()
    first, second = Work(share, 0.0), Work(share, 0.0)
    first.took(0.04, 0.0, 0.0)
    second.took(0.04, 0.0, 0.0)
    # The rate of the next turn is that of two: a quarter of the loop's time each.
    assert first.took(0.0, 0.0, 0.0) == pytest.approx(0.02 / 0.25)
    second.close()
    second.close()
    assert share.above == 1


def test_what_a_caller_takes_counts_for_all_its_connections_and_those_that_follow() -> None:
    share = _with_a_neighbour()
    first = share.of("caller", 0.0)
    first.took(0.04, 0.0, 0.0)
    second = share.of("caller", 0.0)
    assert second.took(0.0, 0.0, 0.0) == pytest.approx(0.04)
    assert share.of("other", 0.0).took(0.0, 0.0, 0.0) == 0
    first.close()
    assert share.above == 1
    second.close()
    assert share.above == 0
    share.forget(9.0)
    again = share.of("caller", 0.0)
    assert again.took(0.0, 0.0, 0.0) > 0, "it gets no more by connecting anew"
    again.close()
    share.forget(11.0)
    assert share.of("caller", 11.0).took(0.019, 0.0, 11.0) == 0


def test_a_request_counts_with_a_part_of_what_its_handler_does() -> None:
    share = _with_a_neighbour()
    work = Work(share, 0.0)
    assert [work.took(0.0, 0.0012, 0.0) > 0 for _ in range(43)] == [False] * 41 + [True] * 2


def test_a_garbage_collection_meanwhile_is_nobodys_fault() -> None:
    work = Work(_with_a_neighbour(), 0.0)
    assert work.took(0.0, 0.0, 1.0) == 0
    assert work.took(3.0, 0.0002, 2.0) == 0


def test_many_that_take_much_leave_something_to_everybody() -> None:
    share = _with_a_neighbour()
    for _ in range(250):
        Work(share, 0.0).took(0.0, 0.1, 0.0)
    assert share.above == 250
    modest = Work(share, 0.0)
    pauses_s = [modest.took(0.001, 0.0002, at_s) for at_s in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)]
    assert pauses_s == [0] * 7


class Waiter:
    """A connection with some pieces of bytes that wait."""

    def __init__(self, name: str, share: Any, ran: list[str], *, last: bool) -> None:
        self.last = last
        self.new = False
        self.pieces = 2
        self.caller_key = "one caller"
        self._name, self._share, self._ran = name, share, ran

    def go_on(self) -> None:
        self._ran.append(self._name)
        self._share.used(TURN_S)
        self.pieces -= 1
        if self.pieces:
            self._share.wait(self)


async def test_a_new_connection_does_not_wait_for_those_that_stay_silent() -> None:
    share: Any = WorkShare()
    ran = list[str]()
    share.used(2 * TURN_S)
    for name in "abc":
        share.wait(Waiter(name, share, ran, last=True))
    new = Waiter("new", share, ran, last=True)
    new.new = True
    share.wait(new)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ran[:2] == ["new", "a"]


async def test_who_waits_goes_on_in_turns_and_those_that_go_last_are_not_forgotten() -> None:
    share: Any = WorkShare()
    ran = list[str]()
    share.used(2 * TURN_S)
    assert share.turn_s < 0
    share.wait(Waiter("late", share, ran, last=True))
    share.wait(Waiter("early", share, ran, last=False))
    share.wait(Waiter("next", share, ran, last=False))
    for _ in range(5):
        await asyncio.sleep(0)
    # Each turn has time for one, and one of the last in any case.
    assert ran == ["early", "late", "next", "late", "early", "next"]
    await asyncio.sleep(0)
    assert share.turn_s == TURN_S


async def test_callers_go_on_in_turns() -> None:
    share: Any = WorkShare()
    ran = list[str]()
    share.used(2 * TURN_S)
    for name in ("a1", "a2", "a3", "b1", "b2"):
        waiter = Waiter(name, share, ran, last=False)
        waiter.caller_key, waiter.pieces = name[0], 1
        share.wait(waiter)
    for _ in range(5):
        await asyncio.sleep(0)
    assert ran == ["a1", "b1", "a2", "b2", "a3"]


def test_a_rate_allows_a_burst_and_then_its_rate() -> None:
    limit = RateLimit(3, 2.0, 0.0)
    assert [limit.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [limit.take(1.0) for _ in range(3)] == [True, True, False]
