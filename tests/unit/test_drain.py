"""Open work that ends, and begins, while somebody waits for it to end."""

from __future__ import annotations

import asyncio

from millstream_server.runtime.drain import OpenWork


async def test_work_that_begins_as_the_last_one_ends_is_waited_for_too() -> None:
    work = OpenWork()
    work.begin()
    waiting = asyncio.ensure_future(work.until_idle(10))
    await asyncio.sleep(0)
    work.end()
    work.begin()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    work.end()
    assert await waiting


async def test_a_limit_that_passes_tells_that_work_is_open() -> None:
    work = OpenWork()
    with work.track():
        assert not await work.until_idle(0.01)
    assert await work.until_idle(0)
