"""How many streams a caller may hold, alone and beside others."""

from __future__ import annotations

import contextlib

import pytest

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.rpc.shares import Shares


def _take_all(shares: Shares, keys: list[str], stack: contextlib.ExitStack) -> dict[str, int]:
    """Let callers take turns until each is refused; return what each holds."""
    held = dict.fromkeys(keys, 0)
    refused: set[str] = set()
    while refused != set(keys):
        for key in keys:
            try:
                stack.enter_context(shares.take(key))
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
        with shares.take("sound"):
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
            stack.enter_context(shares.take(key))
        with pytest.raises(OverloadedError, match="3 streams are open on this server, 0 of them"):
            stack.enter_context(shares.take("d"))
        assert set(shares._held) == {"a", "b", "c"}
    with shares.take("d"):
        assert shares.used == 1
