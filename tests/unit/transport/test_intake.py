"""Bytes of a connection that is over are forgotten, however busy the loop is."""

from __future__ import annotations

import asyncio

from millstream_server.runtime.transport.intake import Intake
from millstream_server.runtime.transport.limits.work import TURN_S, Work, WorkShare


async def test_bytes_that_come_after_the_end_are_not_kept() -> None:
    share, taken = WorkShare(), list[bytes]()
    loop = asyncio.get_running_loop()
    intake = Intake(loop, Work(share, loop.time()), taken.append, lambda: 0, lambda: False)
    share.used(2 * TURN_S)  # nothing is taken in this turn of the loop
    intake.stop()
    intake.take(b"more")
    assert (taken, intake._unread) == ([], b"")
