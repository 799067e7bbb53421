"""Rerank on a worker: scores, their order, and what is refused."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from millstream_server.engines.simulated.vectors import SimulatedEmbedderConfig, logit
from millstream_testing.waiting import until
from tests.support.wire.failures import refusal
from tests.support.worker.embedding_worker import MODEL, embedding_worker

PAIRS = [[1, 2], [1, 9], [1, 2], [1, 700], [5]]


async def test_the_best_come_first_and_equal_ones_by_index() -> None:
    async with embedding_worker() as one:
        response = await one.rerank(PAIRS, request_id="mine")
        order = sorted(range(len(PAIRS)), key=lambda index: (-logit(PAIRS[index]), index))
        assert [result.index for result in response.results] == order
        assert order.index(0) + 1 == order.index(2)  # equal
        for result in response.results:
            assert result.logit == pytest.approx(logit(PAIRS[result.index]), abs=1e-6)
            assert result.score == pytest.approx(1 / (1 + math.exp(-result.logit)), abs=1e-6)
            assert result.document == ""
        assert (response.model, response.request_id) == (MODEL, "mine")
        assert response.usage.input_tokens == 9
        short = await one.rerank(PAIRS, top_n=2)
        assert [result.index for result in short.results] == order[:2]
        assert short.usage.input_tokens == 9
        assert len((await one.rerank(PAIRS, top_n=99)).results) == len(PAIRS)


async def test_more_pairs_than_a_batch_has_room_for() -> None:
    pairs = [[number % 50, number // 50] for number in range(1024)]
    async with embedding_worker(SimulatedEmbedderConfig(max_batch_tokens=100)) as one:
        response = await one.rerank(pairs)
        logits = [result.logit for result in response.results]
        assert logits == sorted(logits, reverse=True)
        assert sorted(result.index for result in response.results) == list(range(1024))
        assert max(map(sum, one.engine.batches)) <= 100


@pytest.mark.parametrize(
    ("pairs", "fields", "violation"),
    [
        ([], {}, ("pairs",)),
        ([[1]] * 1025, {}, ("pairs",)),
        ([[1], []], {}, ("pairs[1]",)),
        ([[1] * 513], {}, ("pairs[0]",)),
        ([[32000]], {}, ("pairs[0]",)),
        ([[1]], {"top_n": 0}, ("top_n",)),
        ([[1]], {"query": "a", "documents": ["b"]}, ("query", "documents")),
        ([[1]], {"return_documents": True}, ("return_documents",)),
    ],
)
async def test_a_bad_request_names_the_field(
    pairs: list[list[int]], fields: dict[str, Any], violation: tuple[str, ...]
) -> None:
    async with embedding_worker() as one:
        failed = await refusal(one.rerank(pairs, **fields))
        assert (failed.code, failed.reason, failed.fields) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            violation,
        )


async def test_a_model_that_embeds_ranks_nothing() -> None:
    async with embedding_worker(SimulatedEmbedderConfig(ranks=False)) as one:
        failed = await refusal(one.rerank([[1]]))
        assert failed.reason == "UNSUPPORTED_FEATURE"
        assert "call Embed" in failed.message


async def test_a_cancelled_call_and_one_that_is_late_free_the_engine() -> None:
    async with embedding_worker() as one:
        one.engine.wedge()
        call = one.rerank([[1]] * 1000)
        await until(lambda: one.engine._waiting > 0)
        call.cancel()
        await asyncio.wait({asyncio.ensure_future(_ended(call))})
        await until(lambda: one.engine._running + one.engine._waiting == 0)
        late = one.rerank([[1]], within_s=0.1)
        assert (await refusal(late)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: one.engine._running + one.engine._waiting == 0)
        one.engine.unwedge()
        assert len((await one.rerank([[1]])).results) == 1


async def _ended(call: Any) -> None:
    with pytest.raises(asyncio.CancelledError):
        await call
