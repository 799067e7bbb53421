"""GenerateImage at the Processor, on workers that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from millstream.v1 import (
    diffusion_pb2,
    diffusion_pb2_grpc,
    errors_pb2,
    media_pb2,
    processor_pb2,
)
from millstream_server.processor.admission import QueueLimits
from millstream_server.processor.requests import RequestLimits
from millstream_testing.in_process import InProcessProcessor, processor
from millstream_testing.waiting import until
from tests.support.processor.played_forwarding import (
    PlayedDiffuser,
    SlotClient,
    cancel_image,
    image,
    image_of,
    played,
    restartable,
    slots,
)
from tests.support.wire.failures import refusal

MODELS = {"drawing": None}


@contextlib.asynccontextmanager
async def drawing(
    *workers: PlayedDiffuser, **options: Any
) -> AsyncIterator[tuple[InProcessProcessor, PlayedDiffuser]]:
    workers = workers or (PlayedDiffuser(),)
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(played(worker)) for worker in workers]
        front = await stack.enter_async_context(processor(MODELS, addresses, **options))
        yield front, workers[0]


async def test_a_file_comes_through_byte_for_byte_after_its_progress() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(7, seed=5, request_id="mine"))
        start = await worker.started()
        worker.progress(start.slot, step=1, steps=4, preview=b"small")
        await until(lambda: bool(client.progress.get(7)))
        assert client.progress[7][-1].preview == b"small"
        worker.finish(start)
        end = await client.end_of(7)
        assert client.files[7] == image_of(5)
        assert end.request_id == "mine"
        assert end.settings.model == "drawing"
        await client.close()
        assert await client.call.code() is grpc.StatusCode.OK


async def test_the_worker_gets_every_default_a_seed_and_an_id() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0, input_image=diffusion_pb2.InputImage(data=b"file")))
        start = await worker.started()
        options = start.options
        assert (options.n, options.width, options.height, options.steps) == (1, 64, 64, 4)
        assert (options.guidance_scale, options.scheduler) == (4, "euler")
        assert options.HasField("seed")
        assert start.input_image.data == b"file"
        assert start.input_image.strength == pytest.approx(0.6)
        assert start.request_id.startswith("req-")


async def test_a_refusal_names_every_field_and_reaches_no_worker() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0, steps=-1, width=9, height=64, scheduler="none"))
        error = await client.error_of(0)
        fields = {violation.field for violation in error.violations}
        assert fields == {"options.steps", "options.width", "options.scheduler"}
        assert error.reason == errors_pb2.ERROR_REASON_INVALID_REQUEST
        assert not worker.starts


async def test_a_request_goes_to_a_worker_that_can_run_it() -> None:
    plain, able = PlayedDiffuser(), PlayedDiffuser(max_steps=100)
    async with (
        drawing(plain, able) as (front, _),
        slots(front.diffusion.GenerateImage()) as client,
    ):
        for slot in range(3):
            await client.send(image(slot, steps=50))
            start = await able.started(slot + 1)
            able.finish(start)
            await client.end_of(slot)
        assert not plain.starts


async def test_two_workers_share_the_requests() -> None:
    one, two = PlayedDiffuser(), PlayedDiffuser()
    async with drawing(one, two) as (front, _), slots(front.diffusion.GenerateImage()) as client:
        for slot in range(2):
            await client.send(image(slot))
        await one.started()
        await two.started()


# ---- an input image in chunks


def piece(upload_id: str, data: bytes, total: int = 0) -> diffusion_pb2.GenerateImageRequest:
    chunk = media_pb2.MediaChunk(upload_id=upload_id, data=data, total_bytes=total)
    return diffusion_pb2.GenerateImageRequest(media_chunk=chunk)


def naming(slot: int, upload_id: str, data: bytes = b"") -> diffusion_pb2.GenerateImageRequest:
    return image(slot, input_image=diffusion_pb2.InputImage(upload_id=upload_id, data=data))


async def test_a_worker_gets_the_whole_of_an_image_in_chunks() -> None:
    half = bytes(range(256)) * (3 << 12)  # 3 MiB
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(piece("a", half, 2 * len(half)))
        await client.send(piece("a", half))
        await client.send(naming(3, "a"))
        start = await worker.started()
        assert start.input_image.data == half + half
        assert not start.input_image.upload_id
        worker.finish(start)
        await client.end_of(3)
        await client.send(naming(4, "a"))  # it was used
        assert [v.field for v in (await client.error_of(4)).violations] == ["input_image.upload_id"]


async def test_a_wrong_upload_fails_its_request_alone() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(piece("a", b"half", 8))
        for slot, message in enumerate((naming(0, "a"), naming(1, "b"), naming(2, "a", b"file"))):
            await client.send(message)
            error = await client.error_of(slot)
            assert [v.field for v in error.violations] == ["input_image.upload_id"]
        await client.send(image(3))
        await worker.started()


async def test_an_image_that_is_too_large_ends_the_stream() -> None:
    async with drawing() as (front, _), slots(front.diffusion.GenerateImage(), listen=False) as c:
        await c.send(piece("a", b"x", (16 << 20) + 1))
        failed = await refusal(c.call.read())
        assert failed.fields == ("media_chunk.total_bytes",)


# ---- waiting


async def test_positions_count_what_runs_before_and_fall_as_it_ends() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        for slot in range(4):
            await client.send(image(slot, seed=slot))
        await until(lambda: client.positions(3) == [3])
        assert (client.positions(1), client.positions(2)) == ([1], [2])
        for slot in range(4):
            start = await worker.started(slot + 1)
            assert start.options.seed == slot, "in the order of arrival"
            worker.finish(start)
            await client.end_of(slot)
        assert client.positions(3)[-1] == 1
        assert client.positions(3) == sorted(client.positions(3), reverse=True)


async def test_a_higher_priority_goes_first_and_the_others_learn_it() -> None:
    async with drawing() as (front, _), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0))
        await client.send(image(1))
        await until(lambda: client.positions(1) == [1])
        await client.send(image(2, priority=processor_pb2.REQUEST_PRIORITY_HIGH))
        await until(lambda: client.positions(1) == [1, 2])
        assert client.positions(2) == [1]


async def test_requests_that_another_processor_sent_count_in_the_position() -> None:
    async with (
        drawing() as (front, worker),
        slots(front.diffusion.GenerateImage()) as client,
    ):
        await client.send(image(0))
        start = await worker.started()
        worker.progress(start.slot, queue_position=2)
        await until(lambda: client.positions(0) == [2])


async def test_a_full_queue_is_overload_with_a_delay() -> None:
    limits = RequestLimits(queue=QueueLimits(max_queued=1))
    async with (
        drawing(limits=limits) as (front, _),
        slots(front.diffusion.GenerateImage()) as client,
    ):
        for slot in range(3):
            await client.send(image(slot))
        error = await client.error_of(2)
        assert error.reason == errors_pb2.ERROR_REASON_OVERLOADED
        assert error.retryable
        assert error.retry_delay.ToNanoseconds() > 0
        assert not client.errors.keys() & {0, 1}


async def test_memory_for_requests_is_bounded_and_given_back() -> None:
    picture = diffusion_pb2.InputImage(data=bytes(900))
    async with (
        drawing(PlayedDiffuser(at_once=2), max_held_bytes=1000) as (front, worker),
        slots(front.diffusion.GenerateImage()) as client,
    ):
        await client.send(image(0, input_image=picture))
        start = await worker.started()
        await client.send(image(1, input_image=picture))
        error = await client.error_of(1)
        assert error.reason == errors_pb2.ERROR_REASON_OVERLOADED
        worker.finish(start)
        await client.end_of(0)
        await client.send(image(2, input_image=picture))
        await worker.started(2)


# ---- cancels, deadlines, losses


async def test_a_cancel_while_it_waits_reaches_no_worker() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0))
        await client.send(image(1))
        await until(lambda: client.positions(1) == [1])
        await client.send(cancel_image(1))
        assert (await client.error_of(1)).reason == errors_pb2.ERROR_REASON_CANCELLED
        worker.finish(await worker.started())
        await client.end_of(0)
        assert len(worker.starts) == 1
        assert front.core.front.queues["drawing"].running == 0


async def test_a_cancel_while_it_runs_reaches_the_worker_which_gets_the_next_request() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0))
        await client.send(image(1, seed=9))
        start = await worker.started()
        await client.send(cancel_image(0))
        assert (await client.error_of(0)).reason == errors_pb2.ERROR_REASON_CANCELLED
        await until(lambda: worker.cancels == [start.slot])
        cancelled = errors_pb2.RequestError(reason=errors_pb2.ERROR_REASON_CANCELLED)
        worker.say(errors=[diffusion_pb2.DiffusionError(slot=start.slot, error=cancelled)])
        second = await worker.started(2)
        worker.finish(second)
        await client.end_of(1)
        assert client.files[1] == image_of(9)


async def test_a_client_that_goes_away_cancels_its_requests() -> None:
    async with drawing() as (front, worker):
        async with slots(front.diffusion.GenerateImage()) as client:
            await client.send(image(0))
            start = await worker.started()
        await until(lambda: worker.cancels == [start.slot])
        await until(lambda: not front.core.work.count)


async def test_a_deadline_goes_with_the_request_and_ends_it() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0, timeout=Duration(nanos=300_000_000)))
        start = await worker.started()
        assert 0 < start.timeout.ToNanoseconds() <= 300_000_000
        error = await client.error_of(0)
        assert error.reason == errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED
        await until(lambda: worker.cancels == [start.slot])


async def test_an_absurd_timeout_is_a_long_one() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0, timeout=Duration(seconds=2**63 - 1)))
        start = await worker.started()
        assert start.timeout.seconds > 365 * 86_400
        worker.finish(start)
        await client.end_of(0)


async def test_the_deadline_of_the_rpc_goes_with_its_requests() -> None:
    async with (
        drawing() as (front, worker),
        slots(front.diffusion.GenerateImage(timeout=60)) as client,
    ):
        await client.send(image(0))
        assert 0 < (await worker.started()).timeout.seconds <= 60
        await client.send(image(1, timeout=Duration(seconds=9)))
        worker.finish(worker.starts[0])
        assert 0 < (await worker.started(2)).timeout.seconds <= 9


async def test_what_a_lost_worker_made_is_made_again_at_another_one() -> None:
    lost, other = PlayedDiffuser(), PlayedDiffuser()
    async with (
        restartable(lost) as (first, end),
        played(other) as second,
        processor(MODELS, [first, second]) as front,
        slots(front.diffusion.GenerateImage()) as client,
    ):
        for slot in range(2):
            await client.send(image(slot, seed=slot))
        begun = await lost.started()
        lost.progress(begun.slot, step=3)
        seen = client.progress.setdefault(begun.options.seed, [])
        await until(lambda: any(each.step == 3 for each in seen))  # no part of a file
        await end()
        for start in ((await other.started()), await other.started(2)):
            other.finish(start)
        for slot in range(2):
            assert (await client.end_of(slot)).settings.seed == slot
        await until(lambda: front.core.front.queues["drawing"].running == 0)


@contextlib.asynccontextmanager
async def _several(
    count: int, **options: Any
) -> AsyncIterator[tuple[InProcessProcessor, SlotClient, Callable[..., Awaitable[PlayedDiffuser]]]]:
    """Serve some workers; the function ends the one that has a request, after a chunk of a file."""
    left = [PlayedDiffuser() for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        served = {id(one): await stack.enter_async_context(restartable(one)) for one in left}
        addresses = [address for address, _ in served.values()]
        front = await stack.enter_async_context(processor(MODELS, addresses, **options))
        client = await stack.enter_async_context(slots(front.diffusion.GenerateImage()))

        async def lose(chunk: bytes = b"") -> PlayedDiffuser:
            await until(lambda: any(one.starts for one in left))
            (lost,) = [one for one in left if one.starts]
            left.remove(lost)
            if chunk:
                lost.say(chunks=[diffusion_pb2.OutputChunk(slot=0, data=chunk)])
                await until(lambda: bool(client.files))
            await served[id(lost)][1]()
            return lost

        yield front, client, lose


@pytest.mark.parametrize(("chunk", "redispatch"), [(b"half", True), (b"", False)])
async def test_a_file_that_has_begun_is_not_made_again_and_none_if_it_is_switched_off(
    chunk: bytes, *, redispatch: bool
) -> None:
    async with _several(2, redispatch=redispatch) as (front, client, lose):
        await client.send(image(0))
        await lose(chunk)
        error = await client.error_of(0)
        assert (error.reason, error.retryable) == (errors_pb2.ERROR_REASON_WORKER_LOST, True)
        await until(lambda: front.core.front.queues["drawing"].running == 0)


async def test_a_request_that_loses_two_workers_is_not_sent_to_a_third() -> None:
    async with _several(3) as (front, client, lose):
        await client.send(image(0))
        assert await lose() is not await lose()
        error = await client.error_of(0)
        assert (error.reason, error.retryable) == (errors_pb2.ERROR_REASON_REPEATED_LOSS, False)
        await until(lambda: front.core.front.queues["drawing"].running == 0)


async def test_a_worker_that_breaks_the_protocol_counts_as_lost() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0))
        await worker.started()
        worker.progress(99, step=1)
        error = await client.error_of(0)
        assert error.reason == errors_pb2.ERROR_REASON_WORKER_LOST
        await until(lambda: front.router.ready("drawing"))


async def test_without_a_worker_the_error_says_so() -> None:
    async with (
        processor(MODELS, [], wait=False) as front,
        slots(front.diffusion.GenerateImage()) as client,
    ):
        await client.send(image(0))
        assert (await client.error_of(0)).reason == errors_pb2.ERROR_REASON_NO_WORKER


# ---- slow clients, shutdown


async def test_a_client_that_never_reads_holds_up_neither_the_worker_nor_others() -> None:
    large = bytes(3 << 20)
    async with (
        drawing() as (front, worker),
        grpc.aio.insecure_channel(front.address) as own,
    ):
        silent: Any = diffusion_pb2_grpc.DiffusionServiceStub(own)
        async with (
            slots(silent.GenerateImage(), listen=False) as deaf,
            slots(front.diffusion.GenerateImage()) as client,
        ):
            for slot in range(3):
                await deaf.send(image(slot))
                worker.finish(await worker.started(slot + 1), large)
            await client.send(image(0, seed=3))
            worker.finish(await worker.started(4))
            await client.end_of(0)
            assert client.files[0] == image_of(3)


async def test_a_shutdown_lets_requests_end_and_tells_a_client_that_stays() -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0, seed=8))
        start = await worker.started()
        draining = asyncio.ensure_future(front.core.work.drain(0, 20))
        await until(lambda: client.draining)
        worker.finish(start)
        await client.end_of(0)
        assert client.files[0] == image_of(8)
        assert await draining, "it doesn't wait for the client to close its side"
        failure = await refusal(client.call)
        assert (failure.code, failure.retryable) == (grpc.StatusCode.UNAVAILABLE, True)
        refused = await refusal(front.diffusion.GenerateImage())
        assert refused.code is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_that_breaks_the_rules_ends_with_the_reason() -> None:
    async with drawing() as (front, _), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0))
        await client.send(image(0))
        failure = await refusal(client.call)
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.fields == ("start.slot",)
