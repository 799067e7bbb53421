"""An item's way through a worker: batches, the cache, joins; cancels and deadlines on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from millstream_server.encode.encoder import Prepared
from millstream_server.engines.simulated.encoder import SimulatedEncoderConfig
from millstream_server.runtime.errors import InvalidRequestError, ServingError
from millstream_testing.waiting import until
from tests.support.media.media_files import solid
from tests.support.worker.encode_worker import (
    Encoder,
    Setup,
    Stream,
    encode_stream,
    encode_worker,
    streaming,
)


def image(tokens: int, color: str = "red") -> bytes:
    """Return an image of so many tokens."""
    return solid(size=(28 * tokens, 28), color=color)


PNG, BLOCKER = image(4), image(1, "black")


async def blocked(one: Encoder, stream: Stream, slot: int = 99) -> None:
    """Keep the tower busy with an item until `unwedge`."""
    one.tower.wedge()
    await stream.start(slot, BLOCKER)
    await until(lambda: one.hosted.pipeline.batcher.running == 1)


# ---- batches -------------------------------------------------------------------------------------


async def test_items_of_several_streams_go_through_the_tower_together() -> None:
    async with streaming() as (one, a), encode_stream(one) as b:
        await blocked(one, a)
        for slot in range(3):
            await a.start(slot, image(slot + 1))
            await b.start(slot, image(slot + 4))
        await until(lambda: one.hosted.pipeline.batcher.queued == 6)
        one.tower.unwedge()
        for slot in range(3):
            assert (await a.encoded(slot)).tokens == slot + 1
            assert (await b.encoded(slot)).tokens == slot + 4
        assert [len(batch) for batch in one.tower.batches] == [1, 6]


async def test_a_batch_keeps_to_its_budget_and_takes_what_fits() -> None:
    async with streaming(Setup(batch_patches=4 * 10)) as (one, stream):
        await blocked(one, stream)
        for slot, tokens in enumerate([6, 5, 4, 30]):
            await stream.start(slot, image(tokens))
            await until(lambda n=slot + 1: one.hosted.pipeline.batcher.queued == n)  # type: ignore[misc]
        one.tower.unwedge()
        for slot in range(4):
            await stream.encoded(slot)
        assert list(one.tower.batches) == [(1,), (6, 4), (5,), (30,)]


async def test_no_more_is_decoded_while_the_queue_of_the_tower_is_full() -> None:
    async with streaming(Setup(batch_patches=4)) as (one, stream):
        await blocked(one, stream)
        for slot in range(12):
            await stream.start(slot, image(1, f"#0000{slot:02x}"))
        await until(lambda: one.hosted.pipeline.batcher.queued >= 3)
        await asyncio.wait_for(one.hosted.load(), 5)
        assert one.decoders.decoded < 12
        one.tower.unwedge()
        for slot in range(12):
            await stream.encoded(slot)


async def test_a_bad_item_of_a_batch_fails_alone() -> None:
    async with streaming() as (one, stream):

        def fault(batch: Sequence[Prepared]) -> ServingError | None:
            if any(item.tokens == 2 for item in batch):
                return InvalidRequestError.of("data", "the tower can't take two tokens")
            return None

        one.tower.fault = fault
        await blocked(one, stream)
        for slot in range(3):
            await stream.start(slot, image(slot + 1))
        await until(lambda: one.hosted.pipeline.batcher.queued == 3)
        one.tower.unwedge()
        assert (await stream.encoded(0)).tokens == 1
        assert (await stream.encoded(2)).tokens == 3
        assert (await stream.error(1))[2] == "data: the tower can't take two tokens"
        assert list(one.tower.batches) == [(1,), (1, 2, 3), (1,), (2,), (3,)]


async def test_a_bug_in_the_tower_is_an_internal_error_without_its_text() -> None:
    async with streaming() as (one, stream):

        def fault(_: Sequence[Prepared]) -> ServingError | None:
            message = "a secret"
            raise ZeroDivisionError(message)

        one.tower.fault = fault
        await stream.start(0, PNG)
        reason, _, message = await stream.error(0)
        assert reason == "INTERNAL"
        assert "secret" not in message
        one.tower.fault = lambda _: None
        await stream.start(1, PNG)
        await stream.encoded(1)


# ---- the cache -----------------------------------------------------------------------------------


async def test_the_same_file_at_the_same_moment_is_encoded_once() -> None:
    async with streaming() as (one, a), encode_stream(one) as b:
        one.tower.wedge()
        await a.start(0, PNG)
        await until(lambda: one.hosted.pipeline.batcher.running == 1)
        await b.announce(0, PNG)  # being made: no bytes are wanted
        await b.start(1, PNG)
        await until(lambda: one.hosted.open_items() == 3)
        one.tower.unwedge()
        first, joined, other = await a.encoded(0), await b.encoded(0), await b.encoded(1)
        assert first.digest == joined.digest == other.digest
        assert (first.cached, joined.cached, other.cached) == (False, True, True)
        assert len({first.lease, joined.lease, other.lease}) == 3
        assert list(one.tower.batches) == [(4,)]
        assert b.wanted == []
        assert one.decoders.begun == 1


async def test_the_first_caller_may_leave_and_the_others_get_the_result() -> None:
    async with streaming() as (one, stream):
        one.tower.wedge()
        await stream.start(0, PNG)
        await until(lambda: one.hosted.pipeline.batcher.running == 1)
        await stream.start(1, PNG)
        await until(lambda: one.hosted.open_items() == 2)
        await stream.cancel(0)
        assert (await stream.error(0))[0] == "CANCELLED"
        one.tower.unwedge()
        assert (await stream.encoded(1)).tokens == 4
        assert list(one.tower.batches) == [(4,)]


async def test_a_failure_is_everyones_and_is_not_kept() -> None:
    async with streaming() as (one, stream):
        one.decoders.going.clear()
        bad = b"\x89PNG\r\n\x1a\n no more"
        await stream.start(0, bad)
        await stream.start(1, bad)
        await until(lambda: one.hosted.open_items() == 2)
        one.decoders.going.set()
        assert (await stream.error(0))[1] == (await stream.error(1))[1] == ["data"]
        await stream.start(2, bad)
        await stream.error(2)
        assert one.decoders.begun == 2


async def test_old_results_make_room_and_leased_ones_do_not() -> None:
    size = 4 * 8 * 4 * 2  # one result of four tokens takes 256 bytes with its alignment
    async with streaming(Setup(store_bytes=2 * size)) as (one, stream):
        leases = []
        for slot, color in enumerate(["red", "green"]):
            await stream.start(slot, image(4, color))
            leases.append((await stream.encoded(slot)).lease)
        await stream.start(2, image(4, "blue"))
        reason, _, message = await stream.error(2)
        assert reason == "OVERLOADED"
        assert "not fetched yet" in message
        await stream.release(leases[0])
        await stream.start(3, image(4, "blue"))
        await stream.encoded(3)
        await stream.start(4, image(4, "green"))
        assert (await stream.encoded(4)).cached
        await stream.announce(5, image(4, "red"))  # it made room
        await until(lambda: stream.wanted == [5])
        await stream.start(6, image(40))
        assert (await stream.error(6))[1] == ["data"]
        assert one.hosted.store.used_bytes == 2 * 256


# ---- cancels and deadlines, at each stage --------------------------------------------------------


async def waiting_for_bytes(one: Encoder, stream: Stream, **changes: Any) -> None:
    assert one.decoders.begun == 0
    await stream.announce(0, PNG, **changes)
    await until(lambda: stream.wanted == [0])


async def queued(one: Encoder, stream: Stream, **changes: Any) -> None:
    one.decoders.going.clear()
    for slot in range(90, 93):  # as many as are decoded and prepared at once
        await stream.start(slot, image(2, f"#0000{slot}"))
    await stream.start(0, PNG, **changes)
    await until(lambda: one.hosted.open_items() == 4)
    assert one.decoders.begun == 2


async def decoding(one: Encoder, stream: Stream, **changes: Any) -> None:
    one.decoders.going.clear()
    await stream.start(0, PNG, **changes)
    await until(lambda: one.decoders.begun == 1)


async def preparing(one: Encoder, stream: Stream, **changes: Any) -> None:
    await stream.start(0, PNG, **changes)
    await until(lambda: one.decoders.decoded == 1)
    assert one.hosted.pipeline.batcher.running == 0


async def in_the_queue_of_the_tower(one: Encoder, stream: Stream, **changes: Any) -> None:
    await blocked(one, stream)
    await stream.start(0, PNG, **changes)
    await until(lambda: one.hosted.pipeline.batcher.queued == 1)


async def in_the_tower(one: Encoder, stream: Stream, **changes: Any) -> None:
    one.tower.wedge()
    await stream.start(0, PNG, **changes)
    await until(lambda: one.hosted.pipeline.batcher.running == 1)


STAGES = [
    waiting_for_bytes,
    queued,
    decoding,
    preparing,
    in_the_queue_of_the_tower,
    in_the_tower,
]
Arrive = Callable[..., Awaitable[None]]


def setup_for(arrive: Arrive, prepare_s: float) -> Setup:
    """Let items stay in the stage of preparing where that is the test's."""
    slow = arrive is preparing
    return Setup(SimulatedEncoderConfig(prepare_s=prepare_s if slow else 0))


async def ended_well(one: Encoder, stream: Stream) -> None:
    """Check that slot 0 has ended once, nothing is held, and the worker goes on."""
    one.tower.unwedge()
    one.decoders.going.set()
    await stream.start(1, image(3))
    await stream.encoded(1)
    await until(lambda: one.hosted.open_items() == 0)
    assert len(stream.ends(0)) == 1
    assert all(4 not in batch or len(batch) == 1 for batch in one.tower.batches)


@pytest.mark.parametrize("arrive", STAGES)
async def test_an_item_is_cancelled_at_any_stage(arrive: Arrive) -> None:
    async with streaming(setup_for(arrive, 0.2)) as (one, stream):
        await arrive(one, stream)
        await stream.cancel(0)
        await stream.cancel(0)
        assert (await stream.error(0))[0] == "CANCELLED"
        await ended_well(one, stream)


@pytest.mark.parametrize("arrive", STAGES)
async def test_its_deadline_ends_it_at_any_stage(arrive: Arrive) -> None:
    async with streaming(setup_for(arrive, 0.8)) as (one, stream):
        await arrive(one, stream, timeout={"nanos": 400_000_000})
        assert (await stream.error(0))[0] == "DEADLINE_EXCEEDED"
        await ended_well(one, stream)


@pytest.mark.parametrize("arrive", STAGES)
async def test_a_caller_that_goes_away_leaves_nothing_behind(arrive: Arrive) -> None:
    async with encode_worker(setup_for(arrive, 0.2)) as one:
        async with encode_stream(one) as stream:
            await arrive(one, stream)
        await until(lambda: one.hosted.open_items() == 0)
        one.tower.unwedge()
        one.decoders.going.set()
        async with encode_stream(one) as stream:
            await stream.start(0, image(3))
            await stream.encoded(0)
        await until(lambda: one.pinned_bytes == 0)


async def test_a_deadline_that_has_passed_starts_nothing() -> None:
    async with streaming() as (one, stream):
        await stream.start(0, PNG, timeout={"nanos": -1})
        assert (await stream.error(0))[0] == "DEADLINE_EXCEEDED"
        assert one.decoders.begun == 0


async def test_a_cancel_after_the_end_changes_nothing() -> None:
    async with streaming() as (one, stream):
        await stream.start(0, PNG)
        await stream.encoded(0)
        await stream.cancel(0)
        await stream.start(1, PNG)
        await stream.encoded(1)
        assert len(stream.ends(0)) == 1
        assert one.pinned_bytes > 0
