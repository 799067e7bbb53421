"""The stall watch finds the loop's longest piece, by CPU time, and says what held it."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

import pytest

from millstream_server.runtime.lifecycle import stall_watch
from millstream_server.runtime.lifecycle.stall_watch import BUSY_S, StallWatch
from millstream_server.runtime.telemetry import metrics
from millstream_testing.waiting import until
from tests.support.telemetry.logged import fields_of


def hold(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def beats() -> float:
    return sum(float(bucket.get()) for bucket in metrics.LOOP_PIECE._buckets)


async def longest(watch: StallWatch, work: Callable[[], None]) -> float:
    """Return the longest piece of a loop that does nothing but some work."""
    began = beats()
    await until(lambda: beats() > began)
    watch.longest_s, began = 0.0, beats()
    work()
    await until(lambda: beats() > began)
    return watch.longest_s


async def test_a_piece_is_measured_by_the_cpu_time_of_the_loops_thread() -> None:
    async with StallWatch(idle_s=BUSY_S) as watch:
        assert 0.05 <= await longest(watch, lambda: hold(0.05)) < 0.05 + 5 * BUSY_S
        assert await longest(watch, lambda: time.sleep(0.05)) < 0.05


async def test_garbage_collections_are_taken_off() -> None:
    garbage = [[index] for index in range(1_000_000)]
    async with StallWatch(idle_s=BUSY_S) as watch:

        def collect() -> None:
            began_s = time.thread_time()
            while time.thread_time() < began_s + 0.05:
                gc.collect()

        assert await longest(watch, collect) < 0.05
    del garbage


async def test_what_holds_the_loop_is_logged_once_with_its_stack(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_watch, "_LOOKS_S", 0.01)
    async with StallWatch():
        with caplog.at_level(logging.WARNING):
            hold(0.5)
            await until(lambda: len(caplog.records) == 1)
            hold(0.01)
    (record,) = caplog.records
    assert record.getMessage().startswith("the event loop is held")
    fields = fields_of(record)
    assert fields["seconds"] >= 0.1
    assert f"{__name__}.hold:" in fields["by"].partition(" < ")[0]
    assert test_what_holds_the_loop_is_logged_once_with_its_stack.__name__ in fields["by"]


async def test_it_ends_with_the_service() -> None:
    before = list(gc.callbacks)
    async with StallWatch() as watch:
        assert len(gc.callbacks) == len(before) + 1
    assert gc.callbacks == before
    assert watch._timer is not None
    assert watch._timer.cancelled()
