"""Frames of a connection are taken in slices; bytes that come after its end are forgotten."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from millstream_server.runtime.transport.intake import TURN_S, Intake, WorkShare
from millstream_testing.waiting import until


class Taker:
    """Takes bytes that are one frame each; stands for the socket, too."""

    def __init__(self, share: WorkShare, *, last: bool) -> None:
        self.unread = b""
        self.taken = 0
        loop = asyncio.get_running_loop()
        self.intake = Intake(loop, share, self._handle, lambda: 0.0, lambda: last)
        self.intake.open(self, "a caller")

    def _handle(self, data: bytes) -> bool:
        self.unread += data
        self.taken += bool(self.unread)
        self.unread = self.unread[1:]
        return bool(self.unread)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def test_bytes_that_come_after_the_end_are_not_kept() -> None:
    share = WorkShare()
    taker = Taker(share, last=False)
    share.used(2 * TURN_S)  # nothing is taken in this turn of the loop
    taker.intake.stop()
    taker.intake.take(b"more")
    assert (taker.taken, taker.intake._unread) == (0, b"")


class Hog:
    """A connection that takes more than a turn of the loop each time that it goes on."""

    last = new = False
    caller_key = "hog"

    def __init__(self, share: Any) -> None:
        self._share = share
        share.wait(self)

    def go_on(self) -> None:
        self._share.used(2 * TURN_S)
        self._share.wait(self)


async def test_a_new_connection_has_a_slice_however_much_others_take() -> None:
    share = WorkShare()
    hogs = [Hog(share) for _ in range(3)]
    await asyncio.sleep(0)
    assert share.turn_s < 0, hogs
    new = Taker(share, last=True)
    new.intake.take(b"preface")
    for _ in range(3):
        await asyncio.sleep(0)
    assert new.taken == len(b"preface")
    new.intake.stop()


class SlowFrames(Taker):
    """Its frames, one a byte, take longer than the shortest slice each."""

    def _handle(self, data: bytes) -> bool:
        until_s = time.thread_time() + 0.0002
        while time.thread_time() < until_s:
            pass
        return super()._handle(data)


async def test_of_a_burst_of_new_connections_each_has_few_frames_before_the_next() -> None:
    """One that brings a request needn't wait until all others have no frames left."""
    share = WorkShare()
    share.used(2 * TURN_S)  # nothing is taken in this turn of the loop
    burst = [SlowFrames(share, last=True) for _ in range(20)]
    for each in burst:
        each.intake.take(bytes(40))
    normal = Taker(share, last=True)
    normal.intake.take(b"chat")
    await until(lambda: normal.taken == len(b"chat"))
    assert max(each.taken for each in burst) < 10
    await until(lambda: not burst[0].intake.new)
    normal.intake.stop()
    for each in burst:
        each.intake.stop()


async def test_a_slice_ends_when_its_time_is_over() -> None:
    share = WorkShare()
    taker = Taker(share, last=False)
    taker.intake.take(bytes(1_000_000))
    assert 0 < taker.taken < 1_000_000
    taken = taker.taken
    await until(lambda: taker.taken > taken)
    taker.intake.stop()


async def test_requests_count_for_the_turn_of_the_loop() -> None:
    """Their work is done later, in tasks."""
    share = WorkShare()
    loop = asyncio.get_running_loop()
    took: list[float] = [TURN_S]
    intake = Intake(loop, share, lambda _: False, took.pop, lambda: False)
    intake.open(None, "a caller")
    intake.take(b"a request")
    assert share.turn_s < 0
    intake.stop()
