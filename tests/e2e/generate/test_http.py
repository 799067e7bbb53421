"""Vectors, ranks and images of real models over HTTP: the same as over gRPC."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from millstream_client import Client
from tests.e2e.generate.conftest import (
    DRAWING,
    EMBEDDER,
    GUIDANCE,
    IMAGE,
    RERANKER,
    SIZE,
    STEPS,
    Suite,
)
from tests.support.clients.http_api import ask
from tests.support.clients.http_api import client as http_client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

QUERY = "How do I bake bread?"
DOCUMENTS = ["The train leaves at nine.", "Knead the dough, and bake the bread."]


async def test_vectors_ranks_and_images(suite: Suite, client: Client) -> None:
    by_grpc = (await client.embed(DOCUMENTS, model=EMBEDDER)).vectors
    ranking = await client.rerank(QUERY, DOCUMENTS, model=RERANKER)
    image = await client.generate_image(**IMAGE, seed=7).result()
    async with http_client(suite.front.address, _strict_response_validation=False) as api:
        vectors: Any = await api.embeddings.create(model=EMBEDDER, input=DOCUMENTS)
        drawing: Any = {
            "size": f"{SIZE}x{SIZE}",
            "seed": 7,
            "num_inference_steps": STEPS,
            "guidance_scale": GUIDANCE,
            "progress": True,
        }
        stream: Any = await api.images.generate(
            model=DRAWING,
            prompt=IMAGE["prompt"],
            stream=True,
            partial_images=1,
            extra_body=drawing,
        )
        events: Any = [event async for event in stream]
    np.testing.assert_allclose([one.embedding for one in vectors.data], by_grpc, atol=1e-6)
    port = int(suite.front.address.rpartition(":")[2])
    asked = {"model": RERANKER, "query": QUERY, "documents": DOCUMENTS}
    ranked = (await ask(port, "/v1/rerank", asked)).json["results"]
    assert [(one["index"], one["relevance_score"]) for one in ranked] == [
        (one.index, pytest.approx(one.score, abs=1e-6)) for one in ranking
    ]
    assert base64.b64decode(events[-1].b64_json) == image.files[0].data
    kinds = [event.type.partition(".")[2] for event in events]
    assert kinds[-1] == "completed"
    assert "partial_image" in kinds
    assert any(event.step == STEPS for event in events if event.type.endswith("progress"))
