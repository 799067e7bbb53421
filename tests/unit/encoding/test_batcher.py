"""Batches, on an encoder that the test steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from millstream_server.encode.encoder import Prepared
from millstream_server.encode.worker.batcher import EncodeStages, ItemBatcher
from millstream_server.media.items import Geometry, Modality
from millstream_server.media.tensor import ElementType, Tensor, TensorSpec
from millstream_server.runtime.errors import InternalError, OverloadedError
from millstream_testing.waiting import until


def item(cost: int, modality: Modality = Modality.IMAGE) -> Prepared:
    return Prepared(modality=modality, tokens=1, geometry=Geometry(), inputs=None, cost=cost)


TENSOR = Tensor(TensorSpec(ElementType.FLOAT32, (1, 1)), memoryview(bytes(4)))


class Stepped:
    """Encodes when it may; fails batches with an item of cost 13, returns too few for cost 14."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)
        self.costs: list[list[int]] = []

    def encode(self, batch: Sequence[Prepared]) -> list[Tensor]:
        self.costs.append([each.cost for each in batch])
        assert self.may.acquire(timeout=10)
        if any(each.cost == 13 for each in batch):
            raise OverloadedError("no memory")
        return [TENSOR for each in batch if each.cost != 14]


@pytest.fixture
async def stepped() -> AsyncIterator[tuple[Stepped, ItemBatcher]]:
    encoder = Stepped()
    batcher = ItemBatcher(encoder.encode, 20)
    yield encoder, batcher
    encoder.may.release(100)
    batcher.close()


def run(batcher: ItemBatcher, *items: Prepared) -> list[asyncio.Task[Tensor]]:
    return [asyncio.create_task(batcher.run(each, EncodeStages())) for each in items]


async def test_what_comes_in_one_turn_goes_together_and_an_idle_tower_starts_at_once(
    stepped: tuple[Stepped, ItemBatcher],
) -> None:
    encoder, batcher = stepped
    tasks = run(batcher, item(5), item(6), item(10), item(7))
    await until(lambda: len(encoder.costs) == 1)
    assert encoder.costs == [[5, 6, 7]]
    assert (batcher.running, batcher.queued) == (3, 1)
    encoder.may.release(2)
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert encoder.costs == [[5, 6, 7], [10]]


async def test_a_batch_has_one_modality_and_a_large_item_goes_alone(
    stepped: tuple[Stepped, ItemBatcher],
) -> None:
    encoder, batcher = stepped
    encoder.may.release(9)
    tasks = run(
        batcher, item(5), item(3, Modality.VIDEO), item(99), item(4), item(2, Modality.VIDEO)
    )
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert encoder.costs == [[5, 4], [3, 2], [99]]


async def test_a_cancelled_item_leaves_the_queue_and_makes_room(
    stepped: tuple[Stepped, ItemBatcher],
) -> None:
    encoder, batcher = stepped
    (first,) = run(batcher, item(1))
    await until(lambda: bool(encoder.costs))
    second, third = run(batcher, item(50), item(2))
    await until(lambda: batcher.queued == 2)
    room = asyncio.create_task(batcher.room())
    second.cancel()
    await asyncio.wait_for(room, 5)
    assert batcher.queued == 1
    first.cancel()  # it is in the tower: its result is dropped
    encoder.may.release(2)
    await asyncio.wait_for(third, 5)
    assert encoder.costs == [[1], [2]]


async def test_items_of_a_failed_batch_are_tried_alone_unless_cancelled(
    stepped: tuple[Stepped, ItemBatcher],
) -> None:
    encoder, batcher = stepped
    good, bad, gone = run(batcher, item(2), item(13), item(3))
    await until(lambda: bool(encoder.costs))
    gone.cancel()
    await asyncio.wait({gone})
    encoder.may.release(9)
    assert await asyncio.wait_for(good, 5) is TENSOR
    with pytest.raises(OverloadedError):
        await asyncio.wait_for(bad, 5)
    assert encoder.costs == [[2, 13, 3], [2], [13]]


async def test_too_few_results_fail_the_item(stepped: tuple[Stepped, ItemBatcher]) -> None:
    encoder, batcher = stepped
    encoder.may.release(9)
    (task,) = run(batcher, item(14))
    with pytest.raises(InternalError):
        await asyncio.wait_for(task, 5)
