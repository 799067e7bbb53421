"""/v1/embeddings, /v1/rerank and /v1/score: what they answer, by the vendors' clients or shapes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio

from millstream_server.embedding.request import Ranked
from millstream_server.engines.simulated import vectors as simulated
from millstream_server.engines.simulated.vectors import SimulatedEmbedder
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import processor
from millstream_testing.waiting import until
from tests.support.clients.http_api import ask, client
from tests.support.processor.every_ability import EMBEDDER, EveryAbility, every_ability
from tests.support.telemetry.spans import (
    TRACE_ID,
    TRACEPARENT,
    SpanLog,
    id_of,
    parent_of,
    trace_of,
)
from tests.support.wire.http_service import post, raw
from tests.support.worker.embedding_worker import embedding_worker, expected

TEXTS = ["red", "a blue sky", "green"]


@pytest_asyncio.fixture
async def suite(tmp_path: Path) -> AsyncIterator[EveryAbility]:
    async with every_ability(tmp_path / "model") as served:
        yield served


def ids(suite: EveryAbility, text: str) -> list[int]:
    return list(suite.text.encode(text, add_special_tokens=True))


def embedding_client(suite: EveryAbility) -> openai.AsyncOpenAI:
    """Make OpenAI's client; its schema doesn't have the base64 that it asks for itself."""
    return client(suite.front.address, _strict_response_validation=False)


def scores(suite: EveryAbility, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Work out what pairs are scored with."""
    logits = [simulated.logit(suite.text.encode_pair(*pair)) for pair in pairs]
    return [Ranked(0, float(np.float32(logit))).score for logit in logits]


# ---- vectors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_a_batch_of_texts(suite: EveryAbility, encoding_format: Any) -> None:
    async with embedding_client(suite) as api:
        answer = await api.embeddings.create(
            model=EMBEDDER, input=TEXTS, dimensions=8, encoding_format=encoding_format
        )
    inputs = [ids(suite, text) for text in TEXTS]
    assert [one.index for one in answer.data] == [0, 1, 2]
    vectors: Any = [one.embedding for one in answer.data]
    if encoding_format == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    np.testing.assert_allclose(vectors, expected(inputs, 8), rtol=1e-6)
    assert answer.model == EMBEDDER
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, inputs))


@pytest.mark.parametrize(
    ("given", "inputs"),
    [("A", [[35]]), ([35, 36], [[35, 36]]), ([[35], [36, 37]], [[35], [36, 37]])],
)
async def test_one_text_or_token_ids(suite: EveryAbility, given: Any, inputs: Any) -> None:
    async with embedding_client(suite) as api:
        answer = await api.embeddings.create(model=EMBEDDER, input=given)
    vectors = [one.embedding for one in answer.data]
    np.testing.assert_allclose(vectors, expected(inputs), rtol=1e-6)


async def test_a_large_batch_comes_whole(suite: EveryAbility) -> None:
    response = await ask(suite.port, "/v1/embeddings", {"input": ["A", "B"] * 1024})
    data = response.json["data"]
    assert response.headers["transfer-encoding"] == "chunked"
    assert [one["index"] for one in data] == list(range(2048))
    np.testing.assert_allclose(data[2047]["embedding"], expected([[36]])[0], rtol=1e-6)
    assert suite.front.core.front.held.used == 0


async def test_vectors_that_are_not_normalized(suite: EveryAbility) -> None:
    response = await ask(suite.port, "/v1/embeddings", {"input": "A", "normalize": False})
    vector = response.json["data"][0]["embedding"]
    assert vector == expected([[35]], normalize=False)[0].tolist()


async def test_a_client_that_leaves_frees_the_worker(suite: EveryAbility) -> None:
    suite.embedder.engine.wedge()
    async with raw(suite.port) as wire:
        wire.send(post("/v1/embeddings", b'{"input": "A"}'))
        await suite.embedder.until_open(1)
    await suite.embedder.until_open(0)
    suite.embedder.engine.unwedge()


async def test_a_request_is_a_span_in_the_callers_trace(tmp_path: Path) -> None:
    spans = SpanLog()
    text = TextModel.load(alphabet_model(tmp_path / "model"))
    async with (
        embedding_worker() as one,
        processor({EMBEDDER: text}, [one.settings.listen], tracing=spans.tracing) as front,
    ):
        headers = f"traceparent: {TRACEPARENT}\r\n"
        await ask(front.port, "/v1/embeddings", {"input": "A"}, headers=headers)
        await until(lambda: any(s.name == "POST /v1/embeddings" for s in spans.ended))
        request, batch = spans.named("POST /v1/embeddings"), spans.named(f"embeddings {EMBEDDER}")
    assert trace_of(request) == TRACE_ID
    assert parent_of(batch) == id_of(request)


# ---- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked(suite: EveryAbility, path: str) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    body = {"model": EMBEDDER, "query": "sky", "documents": documents, "return_documents": True}
    response = await ask(suite.port, path, body, headers="X-Request-Id: me-1\r\n")
    of = scores(suite, [("sky", text) for text in TEXTS])
    order = sorted(range(3), key=lambda index: (-of[index], index))
    answer = response.json
    assert answer["results"] == [
        {
            "index": index,
            "relevance_score": pytest.approx(of[index]),
            "document": {"text": TEXTS[index]},
        }
        for index in order
    ]
    tokens = answer["meta"]["tokens"]["input_tokens"]
    assert tokens == len("sky") * 3 + sum(map(len, TEXTS))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (answer["id"], answer["model"]) == ("me-1", EMBEDDER)


async def test_the_best_documents_alone(suite: EveryAbility) -> None:
    body = {"query": "sky", "documents": TEXTS, "top_n": 1}
    (best,) = (await ask(suite.port, "/v1/rerank", body)).json["results"]
    assert best.keys() == {"index", "relevance_score"}


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        (["a"], ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a", "x", "a"], ["b", "c", "d"], [("a", "b"), ("x", "c"), ("a", "d")]),
    ],
)
async def test_pairs_are_scored_in_order(
    suite: EveryAbility, first: Any, second: Any, pairs: Any
) -> None:
    response = await ask(suite.port, "/v1/score", {"text_1": first, "text_2": second})
    data = response.json["data"]
    assert [one["index"] for one in data] == list(range(len(pairs)))
    assert [one["score"] for one in data] == pytest.approx(scores(suite, pairs))
    assert response.json["usage"]["total_tokens"] == 2 * len(pairs)


async def test_of_many_queries_a_worker_has_a_few_at_a_time(suite: EveryAbility) -> None:
    engine: SimulatedEmbedder = suite.embedder.engine
    engine.wedge()
    texts = [str(number) for number in range(30)]
    asking = asyncio.ensure_future(ask(suite.port, "/v1/score", {"text_1": texts, "text_2": texts}))
    await suite.embedder.until_open(8)
    engine.unwedge()
    response = await asking
    assert len(response.json["data"]) == 30
    await until(lambda: suite.front.core.front.work.count == 0)


# ---- refusals ------------------------------------------------------------------------------------

LONG = "x" * 600


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/embeddings", {"input": []}, "input", "send 1 to 2048"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "must not be empty"),
        ("/v1/embeddings", {"input": [[]]}, "input[0]", "is empty"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input[1]", "Expected `int`"),
        ("/v1/embeddings", {"input": ["a", [1]]}, "input[1]", "Expected `str`"),
        ("/v1/embeddings", {"input": [[1], "a"]}, "input[1]", "Expected `array`"),
        ("/v1/embeddings", {"input": [[]] * 2049}, "input", "has 2049; send 1 to 2048"),
        ("/v1/embeddings", {"input": None}, "input", "Expected `str | array`"),
        ("/v1/embeddings", {"input": [[1 << 31]]}, "input[0]", "token id 2147483648"),
        ("/v1/embeddings", {"input": [-1]}, "input[0]", ">= 0"),
        ("/v1/embeddings", {"input": ["a", LONG]}, "input[1]", "at most 512"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions", "4 or 8 or 16"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "q"}, "prompt_name", "no prompt 'q'"),
        ("/v1/embeddings", {"input": "a", "model": "tiny"}, "model", "chats and continues"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens",
         "not supported"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "send 1 to 1024"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "must not be empty"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "at least 1"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 1 << 31}, "top_n",
         "<= 2147483647"),
        ("/v1/rerank", {"query": "a", "documents": ["a", LONG]}, "documents[1]", "at most 512"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields",
         "not supported"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "as many as text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "send 1 to 1024"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", LONG]}, "text_2[1]", "at most 512"),
        ("/v1/score", {"text_1": "", "text_2": "c"}, "text_1", "must not be empty"),
    ],
)  # fmt: skip
async def test_refusals(
    suite: EveryAbility, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    response = await ask(suite.port, path, body)
    error = response.json["error"]
    assert (response.status, error["param"]) == (400, param), error
    assert says in error["message"]
