"""Embed and Rerank at the Processor, on workers that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from millstream.v1 import embedding_pb2, errors_pb2, processor_pb2
from millstream_server.processor.requests import RequestLimits
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import InProcessProcessor, processor
from millstream_testing.waiting import until
from tests.support.processor.played_forwarding import (
    RANKING,
    PlayedEmbedder,
    batch,
    logit_of,
    pack,
    played,
    restartable,
    slots,
    vector_of,
)
from tests.support.telemetry.logged import events
from tests.support.wire.failures import refusal

TRACEPARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


@contextlib.asynccontextmanager
async def serving(
    text_model: TextModel, *workers: PlayedEmbedder, **options: Any
) -> AsyncIterator[InProcessProcessor]:
    """Serve a Processor over these workers."""
    models = {worker.info.model: text_model for worker in workers}
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(played(worker)) for worker in workers]
        yield await stack.enter_async_context(processor(models, addresses, **options))


def ids_of(text_model: TextModel, text: str) -> Sequence[int]:
    return text_model.encode(text, add_special_tokens=True)


# ---- Embed


async def test_texts_and_their_ids_give_the_same_vectors(text_model: TextModel) -> None:
    worker = PlayedEmbedder()
    texts = ["hello", "a b", "x" * 12]
    async with serving(text_model, worker) as front, slots(front.embedding.Embed()) as client:
        await client.send(batch(0, *texts))
        await client.send(batch(1, *(ids_of(text_model, text) for text in texts)))
        end = await client.end_of(0)
        await client.end_of(1)
        expected = {
            at: pack(vector_of(ids_of(text_model, text), 4)) for at, text in enumerate(texts)
        }
        assert client.vectors[0] == client.vectors[1] == expected
        assert end.model == "embedder"
        assert end.usage.input_tokens == sum(len(ids_of(text_model, text)) for text in texts)
        assert not any(part.HasField("text") for start in worker.starts for part in start.inputs)


async def test_a_long_batch_is_tokenized_in_pieces_and_stays_in_order(
    text_model: TextModel,
) -> None:
    texts = [f"text {number}" for number in range(2048)]
    async with (
        serving(text_model, PlayedEmbedder()) as front,
        slots(front.embedding.Embed()) as client,
    ):
        await client.send(batch(0, *texts, dimensions=3))
        await client.end_of(0)
        for at in (0, 1, 1234, 2047):
            assert client.vectors[0][at] == pack(vector_of(ids_of(text_model, texts[at]), 3))
        assert len(client.vectors[0]) == 2048


async def test_a_text_that_surely_has_too_many_tokens_is_not_tokenized(
    text_model: TextModel,
) -> None:
    """The sentence of one that is tokenized has its number of tokens."""
    long = "a b " * 900_000
    workers = PlayedEmbedder(), PlayedEmbedder("ranker", info=RANKING)
    async with (
        serving(text_model, *workers) as front,
        slots(front.embedding.Embed()) as client,
    ):
        await client.send(batch(0, "a", long, model="embedder"))
        error = await client.error_of(0)
        why = "has more than 16 tokens; this model takes at most 16"
        assert [(v.field, v.description) for v in error.violations] == [("inputs[1].text", why)]
        for query, document, field in ((long, "a", "query"), ("a", long, "documents[1]")):
            request = embedding_pb2.RerankRequest(
                query=query, documents=["a", document], model="ranker"
            )
            failed = await refusal(front.embedding.Rerank(request))
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
            why = f"{field}: has more than 24 tokens; this model takes at most 24"
            assert (failed.fields, failed.message) == ((field,), why)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (batch(0), ["inputs"]),
        (batch(0, *["a"] * 2049), ["inputs"]),
        (batch(0, "a", ""), ["inputs[1].text"]),
        (batch(0, "a", [1], "b" * 100), ["inputs[2].text"]),
        (batch(0, "a", []), ["inputs[1].token_ids"]),
        (batch(0, "a", [4000]), ["inputs[1].token_ids"]),
        (batch(0, "a", dimensions=5), ["dimensions"]),
        (batch(0, "a", request_id="x" * 129), ["request_id"]),
    ],
)
async def test_a_refusal_names_the_client_s_fields(
    text_model: TextModel, message: Any, fields: Sequence[str]
) -> None:
    worker = PlayedEmbedder()
    async with serving(text_model, worker) as front, slots(front.embedding.Embed()) as client:
        await client.send(message)
        error = await client.error_of(0)
        assert [violation.field for violation in error.violations] == fields
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert not worker.starts


async def test_a_very_long_request_id_is_not_logged_whole(
    text_model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        serving(text_model, PlayedEmbedder()) as front,
        slots(front.embedding.Embed()) as client,
    ):
        await client.send(batch(0, "a", request_id="x" * 100_000))
        await client.error_of(0)
    (ended,) = events(caplog, "request ended")
    assert len(ended["request"]) == 128


async def test_a_batch_of_too_many_tokens_is_refused(text_model: TextModel) -> None:
    limits = RequestLimits(max_request_tokens=50)
    async with (
        serving(text_model, PlayedEmbedder(), limits=limits) as front,
        slots(front.embedding.Embed()) as client,
    ):
        await client.send(batch(0, *["abcdef"] * 40))
        error = await client.error_of(0)
        assert [violation.field for violation in error.violations] == ["inputs"]


async def test_two_workers_share_the_batches(text_model: TextModel) -> None:
    one, two = PlayedEmbedder(), PlayedEmbedder()
    one.free.clear()
    two.free.clear()
    async with (
        serving(text_model, one, two) as front,
        slots(front.embedding.Embed()) as client,
    ):
        for slot in range(4):
            await client.send(batch(slot, "a"))
        await until(lambda: (len(one.starts), len(two.starts)) == (2, 2))
        await client.send(batch(4, "a"))
        await until(lambda: front.core.front.queues["embedder"].queued == 1)
        one.free.set()
        two.free.set()
        for slot in range(5):
            await client.end_of(slot)


async def test_a_cancel_reaches_the_worker(text_model: TextModel) -> None:
    worker = PlayedEmbedder()
    worker.free.clear()
    async with serving(text_model, worker) as front, slots(front.embedding.Embed()) as client:
        await client.send(batch(0, "a"))
        await until(lambda: bool(worker.starts))
        cancel = embedding_pb2.CancelEmbed(slot=0)
        await client.send(embedding_pb2.EmbedRequest(cancel=cancel))
        assert (await client.error_of(0)).reason == errors_pb2.ERROR_REASON_CANCELLED
        await until(lambda: worker.cancels == [worker.starts[0].slot])


async def test_the_trace_and_the_priority_go_with_the_batch(text_model: TextModel) -> None:
    worker = PlayedEmbedder()
    async with (
        serving(text_model, worker) as front,
        slots(front.embedding.Embed(metadata=(("traceparent", TRACEPARENT),))) as client,
    ):
        await client.send(batch(0, "a", priority=processor_pb2.REQUEST_PRIORITY_LOW))
        await client.end_of(0)
        assert worker.starts[0].trace.traceparent == TRACEPARENT
        assert worker.starts[0].priority == processor_pb2.REQUEST_PRIORITY_LOW


# ---- Rerank


def ranker() -> PlayedEmbedder:
    return PlayedEmbedder("ranker", RANKING)


def pairs_of(text_model: TextModel, query: str, documents: Sequence[str]) -> list[list[int]]:
    return [text_model.tokenizer.encode(query, document).ids for document in documents]


async def test_documents_are_ranked_as_pairs_best_first(text_model: TextModel) -> None:
    documents = ["red", "blue sky", "green"]
    worker = ranker()
    async with serving(text_model, worker) as front:
        answer = await front.embedding.Rerank(
            embedding_pb2.RerankRequest(
                query="color", documents=documents, top_n=2, return_documents=True
            )
        )
        pairs = pairs_of(text_model, "color", documents)
        best = sorted(range(3), key=lambda at: (-logit_of(pairs[at]), at))[:2]
        assert [ranked.index for ranked in answer.results] == best
        assert [ranked.document for ranked in answer.results] == [documents[i] for i in best]
        assert answer.results[0].logit == pytest.approx(logit_of(pairs[best[0]]))
        assert 0 < answer.results[0].score < 1
        assert answer.model == "ranker"
        assert answer.request_id.startswith("req-")
        assert answer.usage.input_tokens == sum(map(len, pairs))
        same = await front.embedding.Rerank(
            embedding_pb2.RerankRequest(
                pairs=[processor_pb2.TokenIds(ids=pair) for pair in pairs], top_n=2
            )
        )
        assert [r.logit for r in same.results] == [r.logit for r in answer.results]
        assert not same.results[0].document


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        ({"query": "q"}, ("documents",)),
        ({"documents": ["a"]}, ("query",)),
        ({"query": "q", "documents": ["a"], "top_n": 0}, ("top_n",)),
        ({"query": "q", "documents": ["a", "b" * 300]}, ("documents[1]",)),
        ({"query": "q", "documents": ["a"] * 1025}, ("documents",)),
        ({"query": "q", "pairs": [processor_pb2.TokenIds(ids=[1])]}, ("pairs",)),
        ({"pairs": [processor_pb2.TokenIds(ids=[1]), processor_pb2.TokenIds()]}, ("pairs[1]",)),
    ],
)
async def test_a_refused_ranking_names_the_client_s_fields(
    text_model: TextModel, request_: dict[str, Any], fields: Sequence[str]
) -> None:
    worker = ranker()
    async with serving(text_model, worker) as front:
        failure = await refusal(front.embedding.Rerank(embedding_pb2.RerankRequest(**request_)))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.fields == fields
        assert not worker.reranks


async def test_a_ranking_s_deadline_trace_and_cancel_reach_the_worker(
    text_model: TextModel,
) -> None:
    worker = ranker()
    worker.free.clear()
    request = embedding_pb2.RerankRequest(query="q", documents=["a"])
    async with serving(text_model, worker) as front:
        call = front.embedding.Rerank(request, timeout=60, metadata=(("traceparent", TRACEPARENT),))
        await until(lambda: bool(worker.reranks))
        left_s = worker.left_s[0]
        assert left_s is not None
        assert 0 < left_s < 61  # gRPC rounds what is left up on its way
        assert worker.metadata[0]["traceparent"] == TRACEPARENT
        call.cancel()
        await until(lambda: worker.cancelled == 1)
        await until(lambda: front.core.front.queues["ranker"].running == 0)


async def test_a_ranking_whose_worker_is_lost_can_be_sent_again(text_model: TextModel) -> None:
    worker = ranker()
    worker.free.clear()
    request = embedding_pb2.RerankRequest(query="q", documents=["a"])
    async with (
        restartable(worker) as (address, end),
        processor({"ranker": text_model}, [address]) as front,
    ):
        call = front.embedding.Rerank(request)
        await until(lambda: bool(worker.reranks))
        await end()
        failure = await refusal(call)
        assert (failure.reason, failure.retryable) == ("WORKER_LOST", True)
        failure = await refusal(front.embedding.Rerank(request))
        assert failure.reason in {"NO_WORKER", "WORKER_LOST"}


@pytest.mark.parametrize("task", ["embed", "rerank"])
async def test_what_a_lost_worker_computed_is_computed_by_another_one(
    text_model: TextModel, task: str
) -> None:
    make = ranker if task == "rerank" else PlayedEmbedder
    workers = [make(), make()]
    async with contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(restartable(one)) for one in workers]
        models = {workers[0].info.model: text_model}
        front = await stack.enter_async_context(processor(models, [at for at, _ in served]))
        for one in workers:
            one.free.clear()
        asked = asyncio.ensure_future(_ask(front, task))
        await until(lambda: any(one.starts or one.reranks for one in workers))
        (lost,) = [at for at, one in enumerate(workers) if one.starts or one.reranks]
        workers[1 - lost].free.set()
        await served[lost][1]()
        assert await asked == 2
        await until(lambda: front.core.front.queues[workers[0].info.model].running == 0)


async def _ask(front: InProcessProcessor, task: str) -> int:
    """Ask about two texts; return for how many there is a result."""
    if task == "rerank":
        request = embedding_pb2.RerankRequest(query="q", documents=["a", "b"])
        return len((await front.embedding.Rerank(request)).results)
    async with slots(front.embedding.Embed()) as client:
        await client.send(batch(0, "a", "b"))
        await client.end_of(0)
        return len(client.vectors[0])


async def test_a_worker_s_own_refusal_comes_through_with_the_client_s_field(
    text_model: TextModel,
) -> None:
    worker = ranker()
    worker.refuses = [("pairs[0]", "is odd")]
    async with serving(text_model, worker) as front:
        request = embedding_pb2.RerankRequest(query="q", documents=["a"])
        failure = await refusal(front.embedding.Rerank(request))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.fields == ("documents[0]",)
        assert failure.reason == "INVALID_REQUEST"


def test_played_logits_differ() -> None:
    """Else an order could be right by chance."""
    assert all(logit_of([a]) != logit_of([b]) for a, b in itertools.pairwise(range(9)))
