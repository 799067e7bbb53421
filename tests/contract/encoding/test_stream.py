"""The rules of EncodeService.Encode, over a real channel; each bad item beside a good one."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import grpc
import pytest

from millstream.v1 import media_pb2, tensor_pb2
from millstream_server.encode.worker.core import MAX_CHUNK_BYTES, EncodeOptions
from millstream_server.engines.simulated.encoder import SimulatedEncoderConfig
from millstream_server.media.items import MediaLimits
from millstream_testing.waiting import until
from tests.support.media.media_files import png_header, solid, video
from tests.support.wire.failures import failure
from tests.support.worker.encode_worker import (
    VIDEO,
    Setup,
    encode_stream,
    encode_worker,
    streaming,
)

PNG = solid(size=(56, 29), color="#0a141e")  # two cells wide, two high
OTHER = solid(size=(8, 4), color="blue")


async def test_an_image_becomes_a_leased_tensor() -> None:
    async with streaming() as (one, stream):
        await stream.start(7, PNG, request_id="r")
        ref = await stream.encoded(7)
        assert ref.tokens == 4
        assert list(ref.geometry.grid) == [1, 4, 4]
        assert list(ref.tensor.shape) == [4, 8]
        assert ref.tensor.element_type == tensor_pb2.ELEMENT_TYPE_FLOAT32
        assert ref.content == media_pb2.EMBEDDING_CONTENT_ROWS
        assert len(ref.digest) == 32
        assert not ref.cached
        assert 0 < ref.lease_left.ToNanoseconds() / 1e9 <= EncodeOptions().lease_s
        stored = one.hosted.store.get(ref.digest)
        assert stored is not None
        rows = [struct.unpack_from("8f", stored.view, 32 * index) for index in range(4)]
        assert [[*row[:4]] for row in rows] == [[10, 20, 30, index] for index in range(4)]


async def test_a_video_becomes_one_too() -> None:
    async with streaming(Setup(decoders=None)) as (_, stream):
        await stream.start(0, video(8, size=(64, 48), rate=4), modality=VIDEO)
        ref = await stream.encoded(0)
        assert list(ref.geometry.grid) == [2, 4, 6]  # two seconds at two frames each, paired
        assert ref.tokens == 2 * 2 * 3
        assert ref.geometry.seconds_per_step > 0


async def test_bytes_are_wanted_only_when_the_worker_lacks_the_result() -> None:
    async with streaming() as (_, stream):
        await stream.announce(0, PNG)
        await until(lambda: stream.wanted == [0])
        await stream.more(0, PNG[:10])
        await stream.more(0, PNG[10:])
        first = await stream.encoded(0)
        await stream.announce(0, PNG, cache_salt="")
        await until(lambda: len(stream.ends(0)) == 2)
        second = stream.ends(0)[1]
        assert stream.wanted == [0]
        assert (second.digest, second.cached, first.cached) == (first.digest, True, False)
        assert second.lease != first.lease
        await stream.announce(1, PNG, cache_salt="another")
        await until(lambda: stream.wanted == [0, 1])


async def test_another_salt_or_kind_is_another_result() -> None:
    async with streaming() as (one, stream):
        await stream.start(0, PNG)
        await stream.start(1, PNG, cache_salt="s")
        digests = {(await stream.encoded(slot)).digest for slot in (0, 1)}
        assert len(digests) == 2
        assert one.hosted.store.used_bytes >= 2 * 4 * 8 * 4


_BAD: list[tuple[dict[str, Any], bytes, str, str]] = [
    ({"modality": 0}, PNG, "modality", "is not one"),
    ({"modality": 9}, PNG, "modality", "is not one"),
    ({"modality": VIDEO}, PNG, "data", "a video was expected"),
    ({"request_id": "x" * 129}, PNG, "request_id", "at most 128 bytes"),
    ({"total_bytes": 0}, PNG, "total_bytes", "is 0; 1 to 4096 are allowed"),
    ({"total_bytes": 4097, "data": b"", "sha256": bytes(32)}, PNG, "total_bytes", "is 4097; 1 to"),
    ({"total_bytes": 3}, PNG, "total_bytes", "is 3, but `data` has"),
    ({"data": b""}, PNG, "sha256", "is required"),
    ({"sha256": b"x"}, PNG, "sha256", "has 1 bytes; it must have 32"),
    ({"sha256": bytes(32)}, PNG, "sha256", "is not that of the bytes"),
    ({}, PNG[: len(PNG) // 2], "data", ""),
    ({}, png_header(100_000, 100_000), "data", ""),
    ({}, b"<svg xmlns='http://www.w3.org/2000/svg'/>", "data", ""),
    ({}, b"no image at all", "data", ""),
]


async def test_a_bad_item_fails_alone_with_the_field_that_is_wrong() -> None:
    async with streaming(Setup(limits=MediaLimits(max_item_bytes=4096), decoders=None)) as (
        _,
        stream,
    ):
        for changes, data, field, sentence in _BAD:
            before = len(stream.ends(0)), len(stream.ends(1))
            await stream.start(0, data, **changes)
            await stream.start(1, OTHER)
            await until(
                lambda b=before: (
                    (len(stream.ends(0)), len(stream.ends(1)))  # type: ignore[misc]
                    == (b[0] + 1, b[1] + 1)
                )
            )
            error = stream.ends(0)[-1]
            assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], (changes, error)
            assert [v.field for v in error.violations] == [field], (changes, error)
            assert sentence in error.message
            assert stream.ends(1)[-1].tokens == 1


async def test_an_item_of_too_many_tokens_is_refused() -> None:
    async with streaming(Setup(SimulatedEncoderConfig(max_item_tokens=3))) as (_, stream):
        await stream.start(0, PNG)
        reason, fields, message = await stream.error(0)
        assert (reason, fields) == ("INVALID_REQUEST", ["data"])
        assert "takes 4 tokens; 3 are allowed" in message


@pytest.mark.parametrize(
    ("chunks", "field", "sentence"),
    [
        ([b"x" * (len(PNG) + 1)], "total_bytes", f"is {len(PNG)}, but at least {len(PNG) + 1}"),
        ([PNG, b"x"], "data", ""),
        ([PNG[:5], b""], "data", "a message has 0 bytes"),
        ([b"x" * (MAX_CHUNK_BYTES + 1)], "data", f"send 1 to {MAX_CHUNK_BYTES}"),
        ([PNG[:-1] + b"x"], "sha256", "is not that of the bytes"),
    ],
)
async def test_bytes_that_break_the_rules_fail_their_item(
    chunks: list[bytes], field: str, sentence: str
) -> None:
    async with streaming() as (one, stream):
        one.tower.wedge()  # so that the item hasn't ended before its last bytes come
        await stream.announce(0, PNG)
        await until(lambda: stream.wanted == [0])
        for chunk in chunks:
            await stream.more(0, chunk)
        reason, fields, message = await stream.error(0)
        if field == "data" and not sentence:
            assert fields == ["total_bytes"]
        else:
            assert (reason, fields) == ("INVALID_REQUEST", [field])
            assert sentence in message
        one.tower.unwedge()
        await stream.more(0, b"late")  # of a slot that has ended: no error
        await stream.start(1, OTHER)
        await stream.encoded(1)


async def test_bytes_that_nobody_asked_for_fail_their_item() -> None:
    async with streaming() as (one, stream):
        one.tower.wedge()
        await stream.start(0, PNG)
        await stream.more(0, b"x")
        _, fields, message = await stream.error(0)
        assert fields == ["data"]
        assert "hadn't asked for" in message


async def test_a_file_that_is_never_completed_is_given_up() -> None:
    options = EncodeOptions(upload_idle_s=0.1)
    async with streaming(Setup(options=options)) as (_, stream):
        await stream.announce(0, PNG)
        await until(lambda: stream.wanted == [0])
        await stream.more(0, PNG[:9])
        reason, _, message = await stream.error(0)
        assert reason == "UNAVAILABLE"
        assert f"only 9 of {len(PNG)} bytes came, and none for 0.1 s" in message
        assert stream.ends(0)[0].retryable


async def test_files_above_the_budget_are_refused_and_others_go_on() -> None:
    options = EncodeOptions(max_upload_bytes=len(PNG) + 10)
    async with streaming(Setup(options=options)) as (_, stream):
        await stream.announce(0, PNG)
        await until(lambda: stream.wanted == [0])
        await stream.start(1, OTHER)
        reason, _, message = await stream.error(1)
        assert reason == "OVERLOADED"
        assert f"would exceed {len(PNG) + 10}" in message
        assert stream.ends(1)[0].HasField("retry_delay")
        await stream.more(0, PNG)
        await stream.encoded(0)
        await stream.start(2, OTHER)
        await stream.encoded(2)


async def test_items_above_the_limit_are_refused() -> None:
    async with streaming(max_open_requests=1) as (one, stream):
        one.tower.wedge()
        await stream.start(0, PNG)
        await stream.start(1, OTHER)
        reason, _, message = await stream.error(1)
        assert reason == "OVERLOADED"
        assert "1 requests are open" in message
        one.tower.unwedge()
        await stream.encoded(0)


@pytest.mark.parametrize("slot", [3, 1 << 20])
async def test_a_slot_used_twice_or_too_high_ends_the_stream(slot: int) -> None:
    async with encode_worker() as one, encode_stream(one) as other:
        one.tower.wedge()
        await other.start(3, OTHER)
        async with encode_stream(one) as stream:
            await stream.start(3, PNG)
            await stream.start(slot, PNG)
            await until(lambda: stream.ended is not None)
            told = failure(stream.ended)
            assert (told.code, told.fields) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                ("start.slot",),
            )
        one.tower.unwedge()
        await other.encoded(3)


async def test_a_message_without_a_control_ends_the_stream() -> None:
    async with streaming() as (_, stream):
        await stream.send()
        await until(lambda: stream.ended is not None)
        assert failure(stream.ended).fields == ("control",)


async def test_cancelling_an_unused_slot_and_releasing_an_unknown_lease_do_nothing() -> None:
    async with streaming() as (_, stream):
        await stream.cancel(5)
        await stream.release("nobody's")
        await stream.start(5, PNG)
        await stream.encoded(5)


async def test_leases_end_by_release_by_time_and_with_the_stream() -> None:
    options = EncodeOptions(lease_s=0.2)
    async with streaming(Setup(options=options)) as (one, stream):
        await stream.start(0, PNG)
        ref = await stream.encoded(0)
        assert one.pinned_bytes > 0
        await until(lambda: one.pinned_bytes == 0)
        await stream.release(ref.lease)  # too late: ignored
    async with encode_worker() as one:
        async with encode_stream(one) as stream:
            await stream.start(0, PNG)
            await stream.start(1, OTHER)
            first, _ = await stream.encoded(0), await stream.encoded(1)
            before = one.pinned_bytes
            await stream.release(first.lease)
            await until(lambda: 0 < one.pinned_bytes < before)
        await until(lambda: one.pinned_bytes == 0)


async def test_a_caller_that_closes_gets_the_rest_and_the_streams_end() -> None:
    async with streaming() as (one, stream):
        one.tower.wedge()
        await stream.start(0, PNG)
        await stream.call.done_writing()
        await until(lambda: one.hosted.open_items() == 1)
        one.tower.unwedge()
        await stream.encoded(0)
        code = await asyncio.wait_for(stream.call.code(), 5)
        assert code is grpc.StatusCode.OK


async def test_what_ends_at_once_is_in_one_message() -> None:
    async with streaming() as (one, stream):
        one.tower.wedge()
        for slot in range(6):
            await stream.start(slot, solid(size=(8 + slot, 8)))
            await until(lambda: one.hosted.pipeline.batcher.running == 1)
        await until(lambda: one.hosted.pipeline.batcher.queued == 5)
        one.tower.unwedge()
        for slot in range(6):
            await stream.encoded(slot)
        assert [len(response.encoded) for response in stream.responses] == [1, 5]
