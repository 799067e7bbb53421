"""One trace from the client's span to the worker's, for an image and for a batch of texts."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from millstream.v1 import embedding_pb2_grpc, generation_pb2
from tests.e2e.generate.conftest import DRAWING, EMBEDDER, IMAGE, STEPS, Suite
from tests.support.processor.played_forwarding import batch, slots
from tests.support.telemetry.otlp_collector import Received
from tests.support.worker.diffusion_worker import Stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

CLIENT_SPAN = "b7ad6b7169203331"


def traceparent(trace_id: str) -> str:
    return f"00-{trace_id}-{CLIENT_SPAN}-01"


async def way(suite: Suite, trace_id: str, *names: tuple[str, str]) -> list[Received]:
    """Wait for spans of these services and names; check that each is the child of the last."""
    found = await suite.spans(trace_id, set(names))
    spans = [found[name] for name in names]
    assert [span.parent_id for span in spans] == [
        CLIENT_SPAN,
        *(span.span_id for span in spans[:-1]),
    ]
    assert not any(span.failed for span in spans)
    return spans


async def test_of_an_image(suite: Suite, images: Stream) -> None:
    """The request names its trace: a stream may have requests of many."""
    trace_id = "1" * 32
    trace = generation_pb2.TraceContext(traceparent=traceparent(trace_id))
    await images.start(0, **IMAGE, n=2, trace=trace)
    await images.finished(0)
    request, _, served = await way(
        suite,
        trace_id,
        ("millstream-processor", f"generate_image {DRAWING}"),
        ("millstream-processor", "generate_image"),
        ("millstream-diffusion", f"generate_image {DRAWING}"),
    )
    assert request.attributes["gen_ai.provider.name"] == "diffusers"
    assert served.attributes["millstream.diffusion.steps"] == 2 * STEPS


async def test_of_a_batch_of_texts(suite: Suite) -> None:
    trace_id = "2" * 32
    async with grpc.aio.insecure_channel(suite.front.address) as channel:
        stub: Any = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        metadata = (("traceparent", traceparent(trace_id)),)
        async with slots(stub.Embed(metadata=metadata)) as stream:
            await stream.send(batch(0, "bread", "rain", model=EMBEDDER))
            end = await stream.end_of(0)
            await stream.close()
    _, request, _, _ = await way(
        suite,
        trace_id,
        ("millstream-processor", "millstream.v1.EmbeddingService/Embed"),
        ("millstream-processor", f"embeddings {EMBEDDER}"),
        ("millstream-processor", "embed"),
        ("millstream-embedding", f"embeddings {EMBEDDER}"),
    )
    assert request.attributes["gen_ai.usage.input_tokens"] == end.usage.input_tokens
