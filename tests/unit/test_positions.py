"""Positions that are told are the order in which requests are admitted."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from millstream_server.processor.admission import Admission, AdmissionQueue, QueueLimits
from millstream_server.processor.waiting import Positions
from millstream_server.runtime.priority import Priority


@pytest.mark.parametrize("seed", range(5))
async def test_requests_run_in_the_order_that_was_told(seed: int) -> None:
    """Also where a later one of a higher priority has overtaken too often."""
    rng = random.Random(seed)
    queue = AdmissionQueue("m", QueueLimits(), lambda: 1)
    running = queue.enter()
    told: dict[Admission, int] = {}
    positions = Positions(queue, lambda: 0)
    for _ in range(60):
        priority, caller = rng.choice(list(Priority)), rng.choice("aaab")
        admission = queue.enter(priority=priority, caller=caller)
        positions.follow(admission, partial(told.__setitem__, admission))
    await asyncio.sleep(0)
    expected = sorted(told, key=told.__getitem__)
    assert sorted(told.values()) == list(range(1, 61))
    for admission in expected:
        running.leave()
        assert admission.runs
        running = admission


async def test_what_the_workers_have_from_others_counts_and_a_change_is_told_once() -> None:
    queue = AdmissionQueue("m", QueueLimits(), lambda: 1)
    running = queue.enter()
    positions = Positions(queue, lambda: 4)
    told: list[int] = []
    first, second = queue.enter(), queue.enter()
    positions.follow(second, told.append)
    await asyncio.sleep(0)
    assert told == [5]
    queue.enter()  # behind it
    await asyncio.sleep(0)
    assert told == [5]
    first.cancel()
    await asyncio.sleep(0)
    assert told == [5, 4]
    positions.forget(second)
    running.leave()
    await asyncio.sleep(0)
    assert told == [5, 4]
