"""Text work in threads: chats get one beside long work, and work stops with its caller."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import CURRENT_KEY, WorkPool, stop_if_gone
from millstream_testing.waiting import until


@pytest.fixture
def threads() -> Iterator[WorkPool]:
    made = WorkPool(PoolLimits(max_caller_waiting_s=20.0))
    yield made
    made.close()


class Held:
    """Work that runs until it may end."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.go = threading.Event()
        self.stopped = threading.Event()

    def __call__(self) -> bool:
        self.started.set()
        self.go.wait()
        try:
            stop_if_gone()
        except BaseException:
            self.stopped.set()
            raise
        return True


async def as_caller(
    name: str, threads: WorkPool, work: Callable[[], object], seconds: float
) -> object:
    CURRENT_KEY.set(name)
    return await threads.run(work, seconds)


async def test_a_chat_is_served_beside_30_callers_with_large_texts(threads: WorkPool) -> None:
    held = Held()
    greedy = [asyncio.ensure_future(as_caller(f"{n}", threads, held, 2.0)) for n in range(30)]
    await asyncio.to_thread(held.started.wait)
    assert await as_caller("chat", threads, lambda: "chat", 0.01) == "chat"
    assert not any(task.done() for task in greedy)
    held.go.set()
    assert await asyncio.gather(*greedy) == [True] * 30


async def test_callers_take_turns(threads: WorkPool) -> None:
    held, done = Held(), list[str]()
    running = asyncio.ensure_future(threads.run(held, 2.0))
    await asyncio.to_thread(held.started.wait)
    works = [as_caller(caller, threads, partial(done.append, caller), 2.0) for caller in "aaaabbc"]
    waiting = asyncio.gather(*works)
    await asyncio.sleep(0)
    held.go.set()
    await asyncio.gather(running, waiting)
    assert done == ["a", "b", "c", "a", "b", "a", "a"]


async def test_work_of_a_caller_who_left_is_not_begun(threads: WorkPool) -> None:
    held, done = Held(), list[str]()
    running = asyncio.ensure_future(threads.run(held, 2.0))
    await asyncio.to_thread(held.started.wait)
    leaving = asyncio.ensure_future(threads.run(lambda: done.append("left"), 2.0))
    staying = asyncio.ensure_future(threads.run(lambda: done.append("stayed"), 2.0))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    held.go.set()
    await asyncio.gather(running, staying)
    assert done == ["stayed"]


async def test_work_that_runs_stops_when_its_caller_has_left(threads: WorkPool) -> None:
    held = Held()
    running = asyncio.ensure_future(threads.run(held, 2.0))
    await asyncio.to_thread(held.started.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    held.go.set()
    await asyncio.to_thread(held.stopped.wait)
    assert await threads.run(lambda: 5, 2.0) == 5


async def test_errors_of_work_reach_its_caller(threads: WorkPool) -> None:
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, 0.01)


class Text:
    """What work holds: a large text, say."""

    def tokenize(self, held: Held) -> object:
        return held()

    def refuse(self) -> object:
        raise ValueError("too long")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Free only what no cycle holds: with few objects about, collections are hours apart."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_the_text_of_a_caller_who_left_is_freed_at_once(threads: WorkPool) -> None:
    held, text = Held(), Text()
    freed = weakref.ref(text)
    running = asyncio.ensure_future(threads.run(partial(text.tokenize, held), 2.0))
    del text
    await asyncio.to_thread(held.started.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    del running
    held.go.set()
    await until(lambda: freed() is None)


@pytest.mark.usefixtures("no_collector")
async def test_so_is_one_that_an_error_refused(threads: WorkPool) -> None:
    async def asked(text: Text) -> str:
        try:
            await threads.run(text.refuse, 0.01)
        except ValueError as error:
            return str(error)
        return ""

    text = Text()
    freed = weakref.ref(text)
    assert await asked(text) == "too long"
    del text
    await until(lambda: freed() is None)


async def test_work_that_others_displace_ends_with_an_error() -> None:
    threads = WorkPool(PoolLimits(max_waiting_s=10.0))
    held = Held()
    greedy = [asyncio.ensure_future(as_caller("a", threads, held, 4.0)) for _ in range(3)]
    await asyncio.to_thread(held.started.wait)
    other = asyncio.ensure_future(as_caller("b", threads, lambda: "b", 4.0))
    with pytest.raises(OverloadedError, match="retry later"):
        await greedy[2]
    held.go.set()
    assert await asyncio.gather(*greedy[:2], other) == [True, True, "b"]
    threads.close()


async def test_batches_take_turns_and_keep_their_order(threads: WorkPool) -> None:
    done: list[str] = []
    works = {name: [(partial(done.append, name), 0.01)] * 3 for name in "ab"}
    await asyncio.gather(*(threads.in_turns(pieces) for pieces in works.values()))
    assert done == ["a", "b"] * 3


async def test_a_cancelled_batch_stops_after_its_piece(threads: WorkPool) -> None:
    held, second = Held(), Held()
    second.go.set()
    batch = asyncio.ensure_future(threads.in_turns([(held, 0.01), (second, 0.01)]))
    await asyncio.to_thread(held.started.wait)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    held.go.set()
    assert await threads.in_turns([(lambda: 5, 0.01)]) == [5]
    assert not second.started.is_set()
