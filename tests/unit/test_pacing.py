"""When gathered tokens are written."""

from __future__ import annotations

import asyncio
import time

import pytest

from millstream_server.processor.pacing import PacedStream, Pacer

FULL, IDLE = (1.0, 0.0), (0.1, 0.0)
NO_TIME_S = 0.1  # of a wait that must not wait, on a busy machine


async def _waited_s(stream: PacedStream) -> float:
    began = time.monotonic()
    await asyncio.wait_for(stream.wait(), 5)
    return time.monotonic() - began


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


async def test_later_tokens_give_way_to_a_burst_of_first_ones() -> None:
    pacer = Pacer(0.05)
    streams = [pacer.stream() for _ in range(8)]
    pacer._adjust(*IDLE)
    assert pacer.interval_s == 0, "a burst alone is no reason to gather"
    pacer._adjust(*FULL)
    assert pacer.interval_s == 0.05
    for stream in streams:
        stream.touch()
        assert await _waited_s(stream) < NO_TIME_S, "first tokens wait for nothing"
    assert pacer.starting == 0


async def test_a_stream_that_ends_without_a_token_is_no_burst() -> None:
    pacer = Pacer(0.05)
    stream = pacer.stream()
    stream.close()
    stream.close()
    assert pacer.starting == 0


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


# ---- one stream


async def test_with_room_everything_is_due_at_once() -> None:
    stream = Pacer(0.05).stream()
    for _ in range(20):
        stream.touch()
        stream.touch()
        assert await _waited_s(stream) < NO_TIME_S
    assert stream.longest_interval_s == 0


async def test_nothing_is_due_without_a_touch() -> None:
    stream = Pacer(0.05).stream()
    stream.touch()
    await stream.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.wait(), 0.05)


@pytest.mark.parametrize("from_the_client", [True, False])
async def test_the_first_token_never_waits_and_later_ones_keep_the_interval(
    from_the_client: bool,  # noqa: FBT001
) -> None:
    pacer = Pacer(1.0)
    if not from_the_client:
        pacer.interval_s = 0.2
    stream = pacer.stream(0.2 if from_the_client else 0.0)
    stream.touch()
    assert await _waited_s(stream) < NO_TIME_S
    for _ in range(2):
        stream.touch()
        assert 0.15 < await _waited_s(stream) < 0.5
    assert stream.longest_interval_s == 0.2


async def test_the_longer_interval_counts() -> None:
    pacer = Pacer(1.0)
    pacer.interval_s = 0.05
    stream = pacer.stream(0.2)
    stream.touch()
    await stream.wait()
    stream.touch()
    assert await _waited_s(stream) > 0.15


async def test_a_token_that_comes_after_the_interval_does_not_wait() -> None:
    stream = Pacer(1.0).stream(0.05)
    stream.touch()
    await stream.wait()
    await asyncio.sleep(0.06)
    stream.touch()
    assert await _waited_s(stream) < 0.04
    assert stream.longest_interval_s == 0, "nothing was gathered"


async def test_an_end_does_not_wait_for_the_interval() -> None:
    stream = Pacer(1.0).stream(5.0)
    stream.touch()
    await stream.wait()
    stream.touch()
    stream.urge()
    assert await _waited_s(stream) < NO_TIME_S


async def test_a_timer_of_an_earlier_message_does_not_hurry_the_next() -> None:
    stream = Pacer(1.0).stream(0.2)
    stream.touch()
    await stream.wait()
    stream.touch()
    await asyncio.sleep(0.1)
    stream.urge()
    await stream.wait()
    stream.touch()
    assert await _waited_s(stream) > 0.15
