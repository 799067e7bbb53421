"""Workers that send what was not asked for: the request fails, and may be sent again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from millstream.v1 import diffusion_pb2, embedding_pb2, errors_pb2
from millstream_server.processor.text.tokenizer import TextModel
from tests.contract.processor_forwarding.test_images import drawing
from tests.contract.processor_forwarding.test_vectors import serving
from tests.support.processor.played_forwarding import RANKING, PlayedEmbedder, batch, image, slots
from tests.support.wire.failures import refusal

LOST = errors_pb2.ERROR_REASON_WORKER_LOST


class WrongEmbedder(PlayedEmbedder):
    """Sends these vectors, or scores, and ends each request well."""

    vectors: Sequence[dict[str, Any]] = ()
    ranked: Sequence[int] = ()
    text = ""

    async def _embed(self, start: embedding_pb2.StartEmbed, context: Any) -> None:
        response = embedding_pb2.EmbedResponse()
        for vectors in self.vectors:
            response.vectors.add(slot=start.slot, **vectors)
        response.finished.add(slot=start.slot)
        await context.write(response)

    async def Rerank(self, request: Any, context: Any) -> embedding_pb2.RerankResponse:
        results = [
            embedding_pb2.RankedDocument(index=index, document=self.text) for index in self.ranked
        ]
        return embedding_pb2.RerankResponse(results=results, request_id=self.text)


def _finished(**more: Any) -> diffusion_pb2.DiffusionFinished:
    output = diffusion_pb2.DiffusionOutput(total_bytes=0, media_type="image/png")
    return diffusion_pb2.DiffusionFinished(outputs=[output], **more)


def _of_slot(slot: int, entries: Sequence[Any]) -> Sequence[Any]:
    for entry in entries:
        entry.slot = slot
    return entries


@pytest.mark.parametrize(
    "vectors",
    [
        [],
        [{"indices": [0], "dimensions": 4, "values": bytes(16)}],
        [{"indices": [0, 9], "dimensions": 4, "values": bytes(32)}],
        [{"indices": [0, 0], "dimensions": 4, "values": bytes(32)}],
        [{"indices": [0, 1], "dimensions": 4, "values": bytes(31)}],
        [{"indices": [0, 1], "dimensions": 3, "values": bytes(24)}],
        [{"indices": [0, 1], "dimensions": 4, "values": bytes(32)}] * 2,
    ],
)
async def test_wrong_vectors_are_no_good_end(
    text_model: TextModel, vectors: Sequence[dict[str, Any]]
) -> None:
    worker = WrongEmbedder()
    worker.vectors = vectors
    async with serving(text_model, worker) as front, slots(front.embedding.Embed()) as client:
        await client.send(batch(0, "a", "b"))
        error = await client.error_of(0)
        assert (error.reason, error.retryable) == (LOST, True)


@pytest.mark.parametrize("ranked", [[], [0], [0, 0], [0, 2]])
async def test_wrong_scores_are_no_good_end(text_model: TextModel, ranked: Sequence[int]) -> None:
    worker = WrongEmbedder(info=RANKING)
    worker.ranked = ranked
    async with serving(text_model, worker) as front:
        request = embedding_pb2.RerankRequest(query="q", documents=["a", "b"])
        failed = await refusal(front.embedding.Rerank(request))
    assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")


@pytest.mark.parametrize(
    ("chunks", "outputs"), [([], [5]), ([(0, 5)], [6]), ([(0, 5), (1, 5)], [5, 5]), ([(0, 5)], [])]
)
async def test_wrong_files_are_no_good_end(
    chunks: Sequence[tuple[int, int]], outputs: Sequence[int]
) -> None:
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0))
        slot = (await worker.started()).slot
        worker.say(
            chunks=[
                diffusion_pb2.OutputChunk(slot=slot, output=output, data=bytes(size), last=True)
                for output, size in chunks
            ],
            finished=[
                diffusion_pb2.DiffusionFinished(
                    slot=slot,
                    outputs=[
                        diffusion_pb2.DiffusionOutput(total_bytes=size, media_type="image/png")
                        for size in outputs
                    ],
                )
            ],
        )
        error = await client.error_of(0)
        assert (error.reason, error.retryable) == (LOST, True)


@pytest.mark.parametrize(
    "said",
    [
        {"chunks": [diffusion_pb2.OutputChunk(data=bytes(1 << 20))], "times": 20},
        {"progress": [diffusion_pb2.DiffusionProgress(preview=bytes(1 << 20 | 1))]},
        {"finished": [_finished(settings=diffusion_pb2.DiffusionSettings(scheduler="s" * 4097))]},
        {"finished": [_finished(request_id="i" * 4097)], "good": True},
    ],
    ids=["file", "preview", "name", "request id"],
)
async def test_sizes_that_nobody_asked_for(said: dict[str, Any]) -> None:
    said = dict(said)
    times, good = said.pop("times", 1), said.pop("good", False)
    async with drawing() as (front, worker), slots(front.diffusion.GenerateImage()) as client:
        await client.send(image(0, width=64, height=64, request_id="mine"))
        slot = (await worker.started()).slot
        for _ in range(times):
            worker.say(**{name: _of_slot(slot, entries) for name, entries in said.items()})
        if good:
            assert (await client.end_of(0)).request_id == "mine"
        else:
            error = await client.error_of(0)
            assert (error.reason, error.retryable) == (LOST, True)


async def test_a_workers_own_texts_of_scores_are_not_passed_on(text_model: TextModel) -> None:
    worker = WrongEmbedder(info=RANKING)
    worker.ranked, worker.text = [0], "x"
    async with serving(text_model, worker) as front:
        request = embedding_pb2.RerankRequest(query="q", documents=["a"], request_id="mine")
        response = await front.embedding.Rerank(request)
    assert (response.request_id, response.results[0].document) == ("mine", "")
