"""Spans and metrics of forwarded requests."""

from __future__ import annotations

from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.telemetry.metrics import REQUEST_DURATION
from millstream_testing.in_process import processor
from millstream_testing.waiting import until
from tests.support.processor.played_forwarding import (
    PlayedDiffuser,
    PlayedEmbedder,
    batch,
    cancel_image,
    image,
    played,
    slots,
)
from tests.support.telemetry.spans import (
    INCOMING,
    TRACE_ID,
    SpanLog,
    attributes,
    id_of,
    parent_of,
    trace_of,
)


def _count(operation: str, model: str, error: str) -> float:
    child = REQUEST_DURATION.labels(operation, "played", model, model, error)
    return next(s.value for s in child._samples() if s.name == "_count")


async def test_a_batch_is_one_trace_from_the_client_to_the_worker(text_model: TextModel) -> None:
    spans, worker = SpanLog(), PlayedEmbedder()
    before = _count("embeddings", "embedder", "")
    async with (
        played(worker) as address,
        processor(
            {"embedder": text_model},
            [address],
            tracing=spans.tracing,
        ) as front,
        slots(front.embedding.Embed(metadata=INCOMING)) as client,
    ):
        spans.forget()
        await client.send(batch(0, "ab", request_id="mine"))
        await client.end_of(0)
        await client.close()
        await until(lambda: len(spans.ended) == 3)
        rpc = spans.named("millstream.v1.EmbeddingService/Embed")
        request, leg = spans.named("embeddings embedder"), spans.named("embed")
        assert trace_of(rpc) == trace_of(request) == trace_of(leg) == TRACE_ID
        assert parent_of(request) == id_of(rpc)
        assert parent_of(leg) == id_of(request)
        sent = worker.starts[0].trace
        assert sent.traceparent == f"00-{TRACE_ID}-{id_of(leg):016x}-01"
        assert sent.baggage == "tenant=blue"
        said = attributes(request)
        assert said["gen_ai.operation.name"] == "embeddings"
        assert said["gen_ai.provider.name"] == "played"
        assert said["gen_ai.usage.input_tokens"] == client.finished[0].usage.input_tokens
        assert said["gen_ai.response.id"] == "mine"
        assert _count("embeddings", "embedder", "") == before + 1


async def test_a_cancelled_image_ends_its_spans_with_the_reason() -> None:
    spans, worker = SpanLog(), PlayedDiffuser()
    async with (
        played(worker) as address,
        processor({"drawing": None}, [address], tracing=spans.tracing) as front,
        slots(front.diffusion.GenerateImage()) as client,
    ):
        spans.forget()
        await client.send(image(0))
        await worker.started()
        await client.send(cancel_image(0))
        await client.error_of(0)
        for name in ("generate_image", "generate_image drawing"):
            assert attributes(spans.named(name))["error.type"] == "CANCELLED"
