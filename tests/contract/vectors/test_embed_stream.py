"""Embed on a worker: vectors, their order, batches side by side, and how they fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from millstream.v1 import embedding_pb2
from millstream_server.embedding.worker.servicer import VectorSettings
from millstream_server.engines.simulated.vectors import SimulatedEmbedderConfig
from millstream_server.runtime.errors import InternalError
from millstream_testing.waiting import until
from tests.support.wire.failures import failure
from tests.support.worker.embedding_worker import (
    MODEL,
    embed_stream,
    embedding_worker,
    expected,
    streaming,
)

INPUTS = [[1, 2, 3], [3, 2, 1], [7], [31999] * 512]


@pytest.mark.parametrize("dimensions", [None, 16, 8, 4])
@pytest.mark.parametrize("normalize", [None, True, False])
async def test_vectors_are_the_engines_cut_and_of_length_one(
    dimensions: int | None,
    normalize: bool | None,  # noqa: FBT001 - a parameter
) -> None:
    async with streaming() as (_, stream):
        given: dict[str, Any] = {"dimensions": dimensions, "normalize": normalize}
        await stream.start(5, INPUTS, request_id="mine", **given)
        made = await stream.embedded(5)
        cut = expected(INPUTS, dimensions or 16, normalize=normalize is not False)
        np.testing.assert_allclose(made, cut, rtol=2e-7)
        end = await stream.finished(5)
        assert (end.request_id, end.model, end.usage.input_tokens) == ("mine", MODEL, 519)


async def test_many_batches_share_the_engine_and_none_mixes_with_another() -> None:
    config = SimulatedEmbedderConfig(max_batch_tokens=40, max_running_requests=7)
    requests = [
        [[slot, index] * (1 + (slot * index) % 9) for index in range(1 + slot % 12)]
        for slot in range(60)
    ]
    async with embedding_worker(config, max_open_requests=100) as one:
        async with embed_stream(one) as first, embed_stream(one) as second:
            for slot, inputs in enumerate(requests):
                await (first, second)[slot % 2].start(slot, inputs)
            for slot, inputs in enumerate(requests):
                made = await (first, second)[slot % 2].embedded(slot)
                np.testing.assert_allclose(made, expected(inputs), rtol=2e-7)
        assert max(map(len, one.engine.batches)) <= 7
        assert max(map(sum, one.engine.batches)) <= 40
        assert len(one.engine.batches) < sum(map(len, requests)) / 2


async def test_vectors_come_as_they_finish() -> None:
    config = SimulatedEmbedderConfig(max_running_requests=1)
    async with streaming(config) as (one, stream):
        one.engine.wedge()
        await stream.start(0, [[1], [2], [3]])
        await until(lambda: len(one.engine.batches) == 2)  # one at the start, to warm up
        one.engine.unwedge()
        await stream.finished(0)
        parts = [part for response in stream.responses for part in response.vectors]
        assert [list(part.indices) for part in parts] == [[0], [1], [2]]


async def test_2048_inputs_and_a_small_batch_meanwhile() -> None:
    config = SimulatedEmbedderConfig(token_s=0.00002, max_batch_tokens=256)
    large = [[number] * 8 for number in range(2048)]
    async with streaming(config) as (one, stream):
        await stream.start(0, large)
        await until(lambda: len(one.engine.batches) > 3)
        begun = len(one.engine.batches)
        await stream.start(1, [[5] * 3])
        small = await stream.embedded(1)
        assert not stream.ends(0)
        (at,) = [at for at, batch in enumerate(one.engine.batches) if 3 in batch]
        assert at - begun <= 8  # what began while the message came, two in the engine, its own
        np.testing.assert_allclose(small, expected([[5] * 3]), rtol=2e-7)
        made = await stream.embedded(0)
        np.testing.assert_allclose(made, expected(large), rtol=2e-7)


@pytest.mark.parametrize(
    ("inputs", "fields", "violation", "sentence"),
    [
        ([], {}, "inputs", "has 0; send 1 to 2048"),
        ([[1], []], {}, "inputs[1].token_ids", "at least one token"),
        ([[1] * 513], {}, "inputs[0].token_ids", "has 513 tokens; this model takes at most 512"),
        ([[32000]], {}, "inputs[0].token_ids", "this model's are below 32000"),
        ([[1], "text"], {}, "inputs[1].text", "send the text to a Processor"),
        ([[1]], {"dimensions": 5}, "dimensions", "is 5; this model's vectors have 4 or 8 or 16"),
        ([[1]], {"dimensions": -1}, "dimensions", "is -1"),
        ([[1]], {"priority": 99}, "priority", "99"),
        ([[1]], {"request_id": "a" * 129}, "request_id", "at most 128 bytes"),
    ],
)
async def test_a_bad_batch_fails_alone_and_names_the_field(
    inputs: Sequence[Sequence[int] | str], fields: dict[str, Any], violation: str, sentence: str
) -> None:
    async with streaming() as (one, stream):
        before = len(one.engine.batches)
        await stream.start(0, inputs, **fields)
        failed = await stream.failed(0)
        assert (failed.reason, failed.fields) == ("INVALID_REQUEST", [violation])
        assert sentence in failed.message
        assert len(one.engine.batches) == before
        await stream.start(0, [[1]])  # the slot is free again
        await until(lambda: len(stream.ends(0)) == 2)
        assert isinstance(stream.ends(0)[0], embedding_pb2.EmbedFinished)


async def test_a_batch_at_which_the_engine_fails_spoils_no_other() -> None:
    async with streaming() as (one, stream):
        one.engine.wedge()
        one.engine.fault = lambda inputs: InternalError("no") if [13] in inputs else None
        for slot, ids in enumerate(([1], [13], [2])):
            await stream.start(slot, [ids])
        await until(lambda: one.engine._running + one.engine._waiting >= 2)
        one.engine.unwedge()
        await stream.finished(0)
        await stream.finished(2)
        assert (await stream.failed(1)).reason == "INTERNAL"


async def test_a_model_that_ranks_embeds_nothing() -> None:
    async with streaming(SimulatedEmbedderConfig(embeds=False)) as (_, stream):
        await stream.start(0, [[1]])
        failed = await stream.failed(0)
        assert failed.reason == "UNSUPPORTED_FEATURE"
        assert "call Rerank" in failed.message


async def test_cancel_ends_the_slot_and_frees_the_engine() -> None:
    async with streaming() as (one, stream):
        one.engine.wedge()
        await stream.start(0, [[1]] * 2048)
        await stream.start(1, [[2]])
        await until(lambda: one.engine._waiting > 0)
        await stream.cancel(0)
        failed = await stream.failed(0)
        assert (failed.reason, failed.retryable) == ("CANCELLED", False)
        await stream.cancel(0)  # has no effect
        await until(lambda: one.engine.dropped > 0)
        one.engine.unwedge()
        np.testing.assert_allclose(await stream.embedded(1), expected([[2]]), rtol=2e-7)
        assert sum(map(len, one.engine.batches)) < 300


async def test_a_deadline_ends_a_batch_at_any_stage() -> None:
    async with streaming() as (one, stream):
        one.engine.wedge()
        timeout = Duration()
        timeout.FromMilliseconds(50)
        await stream.start(0, [[1]] * 2048, timeout=timeout)
        assert (await stream.failed(0)).reason == "DEADLINE_EXCEEDED"
        await stream.start(1, [[1]], timeout=Duration())
        failed = await stream.failed(1)
        assert (failed.reason, failed.message) == (
            "DEADLINE_EXCEEDED",
            "the deadline passed before the request arrived",
        )


async def test_a_stream_that_ends_drops_its_batches() -> None:
    async with embedding_worker() as one:
        async with embed_stream(one) as stream:
            one.engine.wedge()
            await stream.start(0, [[1]] * 2048)
            await until(lambda: one.engine._waiting > 0)
        await until(lambda: one.engine._running + one.engine._waiting == 0)


async def test_closing_one_side_lets_open_batches_end() -> None:
    async with streaming(SimulatedEmbedderConfig(token_s=0.001)) as (_, stream):
        await stream.start(0, INPUTS[:3])
        await stream.call.done_writing()
        np.testing.assert_allclose(await stream.embedded(0), expected(INPUTS[:3]), rtol=2e-7)
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_slot_used_twice_ends_the_stream() -> None:
    async with streaming() as (one, stream):
        one.engine.wedge()
        await stream.start(0, [[1]])
        await stream.start(0, [[2]])
        await until(lambda: stream.ended is not None)
        told = failure(stream.ended)
        assert (told.code, told.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("start.slot",))


async def test_a_message_without_control_ends_the_stream() -> None:
    async with streaming() as (_, stream):
        await stream.call.write(embedding_pb2.EmbedRequest())
        await until(lambda: stream.ended is not None)
        assert failure(stream.ended).fields == ("control",)


async def test_a_caller_that_does_not_read_holds_up_nobody() -> None:
    config = SimulatedEmbedderConfig(
        width=2048, dimensions=(), max_running_requests=64, max_batch_tokens=64
    )
    async with (
        embedding_worker(config, VectorSettings(max_open_tokens=1 << 20)) as one,
        embed_stream(one) as slow,
        embed_stream(one) as other,
    ):
        slow.reads.clear()
        for slot in range(3):
            await slow.start(slot, [[1]] * 2048)  # 16 MiB of vectors each
        for slot in range(20):
            await other.start(slot, [[slot]])
            await other.finished(slot)
        await until(lambda: one.engine._running + one.engine._waiting == 0)
        held = sum(map(len, one.engine.batches)) * 2048 * 4
        assert held < 32 << 20  # of 48 MiB
        await other.start(20, [[20]])
        await other.finished(20)
        slow.reads.set()
        for slot in range(3):
            await slow.finished(slot)
            assert len(slow.vectors(slot)) == 2048
