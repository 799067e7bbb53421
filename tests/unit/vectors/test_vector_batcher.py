"""Batches of inputs, on an engine that the test steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from millstream_server.embedding.worker.batcher import Batcher, BatchLimits
from millstream_server.runtime.errors import EngineFailedError, InternalError, OverloadedError
from millstream_testing.waiting import until

BAD = 13
"""A batch with such a token fails."""


class Stepped:
    """Returns each input's first token, when it may."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may = asyncio.Semaphore(0)
        self.batches: list[list[list[int]]] = []
        self.cancelled = 0
        self._error = error or OverloadedError("no memory")

    async def compute(self, inputs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        self.batches.append([list(ids) for ids in inputs])
        try:
            await self.may.acquire()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if any(BAD in ids for ids in inputs):
            raise self._error
        return np.array([[ids[0]] for ids in inputs], np.float32)

    def go(self, times: int = 100) -> None:
        for _ in range(times):
            self.may.release()

    @property
    def sizes(self) -> list[list[int]]:
        return [[len(ids) for ids in batch] for batch in self.batches]


def batcher(engine: Stepped, tokens: int = 20, inputs: int = 100, unread: int = 1000) -> Batcher:
    return Batcher(
        engine.compute, BatchLimits(max_tokens=tokens, max_inputs=inputs, max_unread=unread)
    )


def request(name: int, *sizes: int) -> list[list[int]]:
    """Make inputs of these sizes, whose tokens are the request's name."""
    return [[name] * size for size in sizes]


async def collect(one: Batcher, inputs: Sequence[Sequence[int]]) -> list[float]:
    found: dict[int, float] = {}
    async for part in one.run(inputs):
        assert len(part.rows) == len(part.indices)
        for index, row in zip(part.indices, part.rows, strict=True):
            assert index not in found
            found[index] = float(row[0])
    return [found[index] for index in range(len(inputs))]


def start(one: Batcher, *requests: list[list[int]]) -> list[asyncio.Task[list[float]]]:
    return [asyncio.create_task(collect(one, inputs)) for inputs in requests]


async def test_what_comes_in_one_turn_goes_together_and_no_more_than_two_batches_at_once() -> None:
    engine = Stepped()
    one = batcher(engine)
    tasks = start(one, request(1, 5), request(2, 6), request(3, 5))
    await until(lambda: len(engine.batches) == 1)
    later = start(one, request(4, 5))
    await until(lambda: len(engine.batches) == 2)
    last = start(one, request(5, 5), request(6, 6))
    await asyncio.sleep(0)
    engine.go(1)
    assert await asyncio.gather(*tasks) == [[1.0], [2.0], [3.0]]
    await until(lambda: len(engine.batches) == 3)
    engine.go()
    assert await asyncio.gather(*later, *last) == [[4.0], [5.0], [6.0]]
    assert engine.sizes == [[5, 6, 5], [5], [5, 6]]


async def test_batches_stay_within_tokens_and_inputs_but_a_larger_input_goes_alone() -> None:
    engine = Stepped()
    engine.go()
    one = batcher(engine, tokens=20, inputs=3)
    sizes = (9, 9, 9, 50, 1, 1, 1, 1)
    inputs = [[place + 100] * size for place, size in enumerate(sizes)]
    assert await collect(one, inputs) == [float(place + 100) for place in range(len(sizes))]
    assert engine.sizes == [[9, 9], [9], [50], [1, 1, 1], [1]]


async def test_a_small_request_waits_for_no_more_than_what_is_in_the_engine() -> None:
    engine = Stepped()
    one = batcher(engine, tokens=20)
    (large,) = start(one, request(1, *[4] * 100))
    await until(lambda: len(engine.batches) == 2)
    (small,) = start(one, request(2, 4))
    await asyncio.sleep(0)
    engine.go(1)
    await until(lambda: len(engine.batches) == 3)
    assert [2] * 4 in engine.batches[2]
    assert len(engine.batches[2]) == 5  # the large one has the rest
    engine.go(2)
    assert await small == [2.0]
    assert not large.done()
    engine.go()
    assert await large == [1.0] * 100


async def test_requests_take_turns_when_a_batch_has_no_room_for_all() -> None:
    engine = Stepped()
    one = batcher(engine, tokens=10, inputs=2)
    tasks = start(one, *(request(name, 5, 5) for name in (1, 2, 3)))
    await until(lambda: len(engine.batches) == 2)
    engine.go()
    assert await asyncio.gather(*tasks) == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
    names = [[ids[0] for ids in batch] for batch in engine.batches]
    assert names == [[1, 1], [2, 2], [3, 3]]  # none waits for all others' ends


async def test_small_requests_that_keep_coming_do_not_keep_a_large_one_waiting() -> None:
    engine = Stepped()
    engine.go(1000)
    one = batcher(engine, tokens=10)

    async def small(name: int) -> None:
        for _ in range(40):
            await collect(one, request(name, 2))

    callers = [asyncio.create_task(small(name)) for name in range(20, 40)]
    (large,) = start(one, request(1, *[5] * 6))
    assert await large == [1.0] * 6
    assert not any(caller.done() for caller in callers)
    await asyncio.gather(*callers)


async def test_when_a_batch_fails_its_requests_are_tried_alone() -> None:
    engine = Stepped()
    engine.go()
    one = batcher(engine)
    good, bad, also = start(one, request(1, 2, 2), request(BAD, 2), request(3, 2))
    assert await good == [1.0, 1.0]
    assert await also == [3.0]
    with pytest.raises(OverloadedError, match="no memory"):
        await bad
    assert len(engine.batches) == 4


async def test_a_request_that_is_tried_alone_goes_on() -> None:
    engine = Stepped()
    one = batcher(engine, tokens=8)
    good, bad = start(one, request(1, *[2] * 10), request(BAD, 2))
    engine.go()
    assert await good == [1.0] * 10
    with pytest.raises(OverloadedError):
        await bad


async def test_a_dead_engine_fails_all_at_once() -> None:
    engine = Stepped(EngineFailedError("died"))
    engine.go()
    tasks = start(batcher(engine), request(1, 2), request(BAD, 2))
    for task in tasks:
        with pytest.raises(EngineFailedError):
            await task
    assert len(engine.batches) == 1


async def test_a_defect_gets_an_id() -> None:
    engine = Stepped(RuntimeError("secret"))
    engine.go()
    with pytest.raises(InternalError) as caught:
        await collect(batcher(engine), request(BAD, 2))
    assert caught.value.error_id
    assert "secret" not in caught.value.message


async def test_a_cancelled_request_is_dropped_and_a_batch_without_others_stopped() -> None:
    engine = Stepped()
    one = batcher(engine, tokens=8)
    first, second = start(one, request(1, *[4] * 20), request(2, 4))
    await until(lambda: len(engine.batches) == 2)
    assert [2] * 4 in engine.batches[0]
    first.cancel()
    await asyncio.wait({first})
    await until(lambda: engine.cancelled == 1)  # the second batch had nothing else
    engine.go()
    assert await second == [2.0]
    await asyncio.sleep(0)
    assert len(engine.batches) == 2


async def test_a_request_whose_results_are_not_read_gets_no_further_ones() -> None:
    engine = Stepped()
    engine.go()
    one = batcher(engine, tokens=4, unread=3)
    parts = one.run(request(1, *[2] * 10))
    first = await anext(parts)
    (other,) = start(one, request(2, *[2] * 10))
    assert await other == [2.0] * 10
    mine = sum(ids[0] == 1 for batch in engine.batches for ids in batch)
    assert mine == 3
    indices = [*first.indices]
    async for part in parts:
        indices += part.indices
    assert indices == list(range(10))
