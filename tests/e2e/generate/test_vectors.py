"""Texts to vectors and to ranks by real models, through the Processor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from millstream.v1 import embedding_pb2
from millstream_client import Client
from tests.e2e.generate.conftest import EMBEDDER, RERANKER, Suite, model_of
from tests.support.engines.bare_vectors import BareProcess

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

QUERY = "How do I bake bread?"
DOCUMENTS = [
    "The train to the coast leaves at nine.",
    "Knead the dough, let it rise, and bake the bread in a hot oven.",
    "Rain is expected in the mountains tomorrow.",
    "A doctor looks after sick people in the hospital.",
    "Ölmühle, 水車, 🌾: words that the model has never seen.",
]
BREAD = 1


@pytest.fixture(scope="module")
def bare(suite: Suite) -> Iterator[BareProcess]:
    """SGLang's engine itself with the embedder, and transformers."""
    del suite  # asked for so that the engines don't start at once
    engine = BareProcess(model_of(EMBEDDER))
    try:
        yield engine
    finally:
        engine.close()


def tokenizer(model: str) -> Any:
    return Tokenizer.from_file(str(model_of(model) / "tokenizer.json"))


async def embed(client: Client, texts: list[str], **fields: Any) -> np.ndarray:
    return np.array((await client.embed(texts, model=EMBEDDER, **fields)).vectors)


async def test_vectors_equal_the_engines_own_and_transformers(
    client: Client, bare: BareProcess
) -> None:
    texts = [QUERY, *DOCUMENTS, "a", "bread " * 300]
    inputs = [found.ids for found in tokenizer(EMBEDDER).encode_batch(texts)]
    raw = np.array(await asyncio.to_thread(bare.ask, inputs=inputs))
    truth = np.array(await asyncio.to_thread(bare.ask, inputs=inputs, kind="qwen3"))
    made = await client.embed(texts, model=EMBEDDER)
    vectors = np.array(made.vectors)
    np.testing.assert_allclose(vectors, raw, atol=1e-6)
    assert (vectors * truth).sum(axis=1).min() >= 0.9999
    assert np.abs(vectors @ vectors.T - np.eye(len(texts))).max() < 0.9999, "all differ"
    assert made.input_tokens == sum(map(len, inputs))
    by_ids = await client.embed(inputs, model=EMBEDDER)
    np.testing.assert_allclose(np.array(by_ids.vectors), vectors, atol=1e-6)


async def test_a_query_finds_its_document_also_with_fewer_dimensions(client: Client) -> None:
    (model,) = [model for model in await client.models() if model.name == EMBEDDER]
    assert list(model.embedding.dimensions) == [32, 64, 128]
    whole = await embed(client, [QUERY, *DOCUMENTS])
    assert (whole[1:] @ whole[0]).argmax() == BREAD
    for dimensions in (32, 64):
        cut = await embed(client, [QUERY, *DOCUMENTS], dimensions=dimensions)
        assert (cut[1:] @ cut[0]).argmax() == BREAD
        expected = whole[:, :dimensions]
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(cut, expected, atol=1e-6)


async def test_ranks_are_sensible_and_equal_transformers(client: Client, bare: BareProcess) -> None:
    pairs = tokenizer(RERANKER).encode_batch([(QUERY, document) for document in DOCUMENTS])
    job = {"model": str(model_of(RERANKER)), "kind": "xlmr_ranker"}
    inputs = [pair.ids for pair in pairs]
    truth = await asyncio.to_thread(bare.ask, inputs=inputs, **job)
    ranked = await client.rerank(QUERY, DOCUMENTS, model=RERANKER, return_documents=True)
    assert ranked[0].index == BREAD
    assert [one.document for one in ranked] == [DOCUMENTS[one.index] for one in ranked]
    assert ranked == sorted(ranked, key=lambda one: -truth[one.index])
    logits = {one.index: one.logit for one in ranked}
    np.testing.assert_allclose([logits[i] for i in range(len(DOCUMENTS))], truth, atol=1e-4)
    for one in ranked:
        assert one.score == pytest.approx(1 / (1 + np.exp(-one.logit)))
    best = await client.rerank(QUERY, DOCUMENTS, model=RERANKER, top_n=2)
    assert [one.index for one in best] == [one.index for one in ranked[:2]]
    assert isinstance(best[0], embedding_pb2.RankedDocument)
