"""The same requests at a worker and through a Processor; on simulated engines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from millstream.v1 import (
    diffusion_pb2,
    embedding_pb2,
    embedding_pb2_grpc,
    processor_pb2,
)
from millstream_server.diffusion.request import Kind
from millstream_server.diffusion.worker.engine import DiffusionOptions
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import InProcessProcessor, processor
from millstream_testing.waiting import until
from tests.support.processor.played_forwarding import batch, slots
from tests.support.worker import embedding_worker
from tests.support.worker.diffusion_worker import (
    MODEL,
    VIDEOS,
    Setup,
    SlotView,
    Stream,
    Worker,
    diffusion_worker,
    opened,
)

QUEUED = 50


@contextlib.asynccontextmanager
async def both(
    setup: Setup | None = None,
) -> AsyncIterator[tuple[Worker, InProcessProcessor, Stream]]:
    """Serve a worker, a Processor before it, and a stream to the Processor."""
    kind = setup.options.kind if setup else Kind.IMAGE
    async with (
        diffusion_worker(setup) as one,
        processor({MODEL: None}, [one.settings.listen]) as front,
    ):
        stream = Stream(front.diffusion, kind)
        stream.read_on()
        try:
            yield one, front, stream
        finally:
            await stream.close()


async def test_the_same_seed_gives_the_same_bytes_through_a_processor() -> None:
    async with both() as (one, _, through), opened(one) as direct:
        for stream in (direct, through):
            await stream.start(0, seed=7, n=2, steps=3, request_id="same", model=MODEL)
        near, far = await direct.finished(0), await through.finished(0)
        assert far.files == near.files
        assert len(far.files) == 2
        assert far.finished is not None
        assert near.finished is not None
        assert far.finished.outputs == near.finished.outputs
        assert far.finished.settings == near.finished.settings


async def test_videos_go_the_same_way() -> None:
    async with both(VIDEOS) as (_, front, stream):
        await stream.start(0, seed=1)
        view = await stream.finished(0)
        assert view.finished is not None
        assert view.finished.outputs[0].media_type == "video/mp4"
        assert view.finished.outputs[0].total_bytes == len(view.files[0])
        listed = await front.stub.ListModels(processor_pb2.ListModelsRequest())
        (model,) = listed.models
        assert list(model.tasks) == [processor_pb2.MODEL_TASK_GENERATE_VIDEO]


async def test_a_file_that_the_worker_refuses_harms_nobody_else() -> None:
    async with both(Setup(options=DiffusionOptions(max_input_bytes=1 << 20))) as (one, _, stream):
        one.engine.by_hand()
        await stream.start(0)
        await one.until_load(1, 0)
        await stream.start(1, input_image=diffusion_pb2.InputImage(data=bytes(3 << 20)))
        refused = await stream.ended(1)
        assert (refused.reason, refused.fields) == ("INVALID_REQUEST", ["input_image.data"])
        assert "1048576 are allowed" in refused.message
        one.engine.allow(5)
        await stream.finished(0)


def _is_at(view: SlotView, position: int) -> bool:
    return view.positions[-1] == position


async def test_many_queued_requests_run_in_order_with_true_positions() -> None:
    """They wait in part here, in part at the worker."""
    async with both() as (one, _, stream):
        one.engine.by_hand()
        for slot in range(QUEUED):
            await stream.start(slot, steps=1)
        last = stream.slots[QUEUED - 1]
        await until(lambda: last.positions[:1] == [QUEUED - 1])
        for slot in range(QUEUED - 2):
            one.engine.allow(2)  # a step and the end
            await stream.finished(slot)
            await until(partial(_is_at, last, QUEUED - 2 - slot))
        assert last.positions == sorted(last.positions, reverse=True)
        one.engine.allow(4)
        for slot in (QUEUED - 2, QUEUED - 1):
            await stream.finished(slot)
            assert all(1 <= position <= slot for position in stream.slots[slot].positions)


def _embed(channel: Any) -> Any:
    stub: Any = embedding_pb2_grpc.EmbeddingServiceStub(channel)
    return stub.Embed()


async def test_vectors_and_scores_through_a_processor_are_the_worker_s(
    text_model: TextModel,
) -> None:
    texts = ["red", "a blue sky", "green"]
    ids = [text_model.encode(text, add_special_tokens=True) for text in texts]
    async with (
        embedding_worker.embedding_worker() as one,
        processor({embedding_worker.MODEL: text_model}, [one.settings.listen]) as front,
        slots(_embed(one.channel)) as direct,
        slots(front.embedding.Embed()) as through,
    ):
        await direct.send(batch(0, *ids, dimensions=8))
        await through.send(batch(0, *texts, dimensions=8))
        usage = (await direct.end_of(0)).usage
        assert (await through.end_of(0)).usage == usage
        assert through.vectors[0] == direct.vectors[0]
        answer = await front.embedding.Rerank(
            embedding_pb2.RerankRequest(query="sky", documents=texts, return_documents=True)
        )
        scores = [ranked.logit for ranked in answer.results]
        assert scores == sorted(scores, reverse=True)
        assert {ranked.document for ranked in answer.results} == set(texts)
