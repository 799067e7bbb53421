"""Chats get a text thread while batches are tokenized."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from millstream_server.processor.text.threads import TextThreads


@pytest.fixture
def threads() -> Iterator[TextThreads]:
    made = TextThreads(2)
    yield made
    made.close()


async def test_a_chat_does_not_wait_for_batches(threads: TextThreads) -> None:
    go = threading.Event()
    batches = [asyncio.ensure_future(threads.in_turns([go.wait, go.wait])) for _ in range(8)]
    await asyncio.sleep(0)
    assert await threads.run(lambda: "chat") == "chat"
    assert not any(batch.done() for batch in batches)
    go.set()
    assert await asyncio.gather(*batches) == [[True, True]] * 8


async def test_batches_take_turns_and_keep_their_order(threads: TextThreads) -> None:
    done: list[str] = []
    works = {name: [lambda name=name: done.append(name)] * 3 for name in "ab"}
    await asyncio.gather(*(threads.in_turns(pieces) for pieces in works.values()))
    assert done == ["a", "b"] * 3


async def test_a_cancelled_batch_stops_after_its_piece(threads: TextThreads) -> None:
    started, go = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        started.set()
        go.wait()

    batch = asyncio.ensure_future(threads.in_turns([first, lambda: done.append(1)]))
    await asyncio.to_thread(started.wait)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    go.set()
    assert await threads.in_turns([lambda: 5]) == [5]
    assert not done
