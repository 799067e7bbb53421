"""When gathered tokens are written."""

from __future__ import annotations

import asyncio
import time

import pytest

from millstream_server.processor.output import Pacer

FULL, IDLE = (1.0, 0.0), (0.1, 0.0)


# ---- the interval


def test_an_idle_process_does_not_gather() -> None:
    pacer = Pacer(0.05)
    for _ in range(100):
        pacer._adjust(*IDLE)
    assert pacer.interval_s == 0


@pytest.mark.parametrize("sign", [FULL, (0.0, 1.0)])
def test_a_full_or_late_process_gathers_more_and_more_up_to_the_bound(
    sign: tuple[float, float],
) -> None:
    pacer = Pacer(0.05)
    seen = [pacer.interval_s]
    for _ in range(100):
        pacer._adjust(*sign)
        seen.append(pacer.interval_s)
    assert seen == sorted(seen)
    assert 0 < seen[1] <= 0.002
    assert seen[-1] == max(seen) == 0.05
    assert seen.index(0.05) <= 25, "half a second at the latest"


def test_later_tokens_give_way_to_a_burst_of_first_ones() -> None:
    pacer = Pacer(0.05)
    pacer.starting = 8
    pacer._adjust(*IDLE)
    assert pacer.interval_s == 0, "a burst alone is no reason to gather"
    pacer._adjust(*FULL)
    assert pacer.interval_s == 0.05


def test_it_shrinks_back_to_nothing() -> None:
    pacer = Pacer(0.05)
    for _ in range(100):
        pacer._adjust(*FULL)
    seen = []
    for _ in range(25):
        pacer._adjust(*IDLE)
        seen.append(pacer.interval_s)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 0, "half a second at the latest"


def test_between_full_and_idle_it_stays() -> None:
    pacer = Pacer(0.05)
    pacer._adjust(*FULL)
    pacer._adjust(*FULL)
    before = pacer.interval_s
    pacer._adjust(0.68, 0.0)
    assert pacer.interval_s == before > 0


async def test_a_busy_event_loop_is_noticed() -> None:
    pacer = Pacer(0.05)
    pacer.open()
    deadline = time.monotonic() + 5
    while not pacer.interval_s and time.monotonic() < deadline:
        until = time.monotonic() + 0.03
        while time.monotonic() < until:
            pass
        await asyncio.sleep(0)
    assert pacer.interval_s > 0
    await pacer.close()
    await pacer.close()


# ---- who waits


async def test_all_that_wait_go_on_together_an_interval_after_the_last() -> None:
    pacer = Pacer(1.0)
    pacer.interval_s = 0.1
    went: list[tuple[str, float]] = []
    began = time.monotonic()
    for name in "ab":
        pacer.later(lambda name=name: went.append((name, time.monotonic() - began)))  # type: ignore[misc]
    await asyncio.sleep(0.02)
    assert [name for name, _ in went] == ["a", "b"], "the last time is long ago"
    pacer.later(lambda: went.append(("c", time.monotonic() - began)))
    await asyncio.sleep(0.02)
    pacer.later(lambda: went.append(("d", time.monotonic() - began)))
    await asyncio.sleep(0.12)
    assert [name for name, _ in went] == ["a", "b", "c", "d"]
    assert went[2][1] >= 0.1
