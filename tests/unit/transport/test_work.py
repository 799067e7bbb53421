"""A connection whose frames take more than its share of the loop is read later."""

from __future__ import annotations

import pytest

from millstream_server.runtime.transport.rate_limit import RateLimit
from millstream_server.runtime.transport.work import Work, WorkShare


def test_what_is_saved_up_costs_no_pause() -> None:
    work = Work(WorkShare(), 0.0)
    assert work.took(0.004, 0, 0.0) == 0
    assert work.took(0.09, 0, 10.0) == 0  # 0.1 s at most is saved up in ten seconds


def _with_a_neighbour() -> WorkShare:
    """Let a connection be served that takes little."""
    share = WorkShare()
    Work(share, 0.0).took(0.001, 1, 0.0)
    return share


def test_without_neighbours_there_is_no_pause() -> None:
    share = _with_a_neighbour()
    work = Work(share, 0.0)
    assert work.took(0.2, 0, 0.5) > 0
    assert work.took(0.2, 0, 1.6) == 0  # the neighbour was served more than a second ago
    assert share.greedy == 1


def test_above_the_share_the_pause_brings_it_back() -> None:
    share = _with_a_neighbour()
    work = Work(share, 0.0)
    pause_s = work.took(0.025, 0, 0.0)  # 0.02 s too much, at half of the loop's time
    assert pause_s == pytest.approx(0.04)
    assert share.greedy == 1
    assert work.took(0.0, 0, pause_s + 0.001) == 0
    assert share.greedy == 0


def test_those_above_their_share_divide_it() -> None:
    share = _with_a_neighbour()
    first, second = Work(share, 0.0), Work(share, 0.0)
    first.took(0.025, 0, 0.0)
    second.took(0.025, 0, 0.0)
    # The rate of the next turn is that of two: a quarter of the loop's time each.
    assert first.took(0.0, 0, 0.0) == pytest.approx(0.02 / 0.25)
    second.close()
    second.close()
    assert share.greedy == 1


def test_requests_cost_something_whatever_their_frames_do() -> None:
    work = Work(_with_a_neighbour(), 0.0)
    assert work.took(0.0, 20, 0.0) == 0
    assert work.took(0.0, 200, 0.0) > 0


def test_a_rate_allows_a_burst_and_then_its_rate() -> None:
    limit = RateLimit(3, 2.0, 0.0)
    assert [limit.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [limit.take(1.0) for _ in range(3)] == [True, True, False]
