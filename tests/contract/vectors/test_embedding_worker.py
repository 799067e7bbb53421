"""The life of an embedding worker: its info, limits, hangs, drains, death, spans and metrics."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from millstream.v1 import worker_pb2
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.embedding.worker.servicer import VectorSettings
from millstream_server.engines.simulated.vectors import SimulatedEmbedderConfig
from millstream_server.runtime.lifecycle.main import DRAINED, FAILED
from millstream_server.worker_info import description_from_proto
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.telemetry.otlp_collector import collecting
from tests.support.telemetry.scraping import scrape
from tests.support.wire.failures import refusal
from tests.support.wire.long_streams import NOT_SERVING, SERVING
from tests.support.worker.embedding_worker import (
    MODEL,
    Stream,
    embed_stream,
    embedding_worker,
    expected,
    streaming,
)
from tests.support.worker.hosted_worker import SOON


async def test_it_says_what_it_embeds_and_how_loaded_it_is() -> None:
    config = SimulatedEmbedderConfig(dimensions=(4, 8), max_input_tokens=77, vocab_size=900)
    async with streaming(config) as (one, stream):
        info = (await one.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        assert (info.role, info.model) == (worker_pb2.WORKER_ROLE_EMBEDDING, MODEL)
        engine = description_from_proto(info).engine
        assert isinstance(engine, EmbedderInfo)
        assert (engine.embeds, engine.ranks, engine.width) == (True, True, 16)
        assert (engine.dimensions, engine.max_input_tokens) == ((4, 8), 77)
        assert (engine.vocab_size, engine.max_running_requests) == (900, 64)
        one.engine.wedge()
        await stream.start(0, [[1]] * 70)
        await until(lambda: one.engine._waiting > 0)
        load = (await one.about.WatchLoad(worker_pb2.WatchLoadRequest()).read()).load
        assert (load.running_requests, load.queued_requests) == (64, 6)


async def test_a_batch_before_the_model_is_loaded_is_refused() -> None:
    port = free_port()

    async def early() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", SOON) as channel:
            await channel.channel_ready()
            stream = Stream(channel)
            await stream.start(0, [[1]])
            failed = await stream.failed(0)
            assert failed.retryable
            assert "still loading" in failed.message
            await stream.close()

    told = asyncio.ensure_future(early())
    async with embedding_worker(SimulatedEmbedderConfig(load_s=1.0), listen=f"127.0.0.1:{port}"):
        await told


async def test_it_holds_no_more_than_its_limits() -> None:
    async with streaming(None, VectorSettings(max_open_tokens=10), max_open_requests=2) as (
        one,
        stream,
    ):
        one.engine.wedge()
        await stream.start(0, [[1] * 9])
        await until(lambda: one.engine._running == 1)
        await stream.start(1, [[1], [2]])
        failed = await stream.failed(1)
        assert (failed.reason, failed.retryable) == ("OVERLOADED", True)
        assert "2 more prompt tokens would exceed the 10" in failed.message
        late = await refusal(one.rerank([[1], [2]]))
        assert (late.code, late.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        await stream.start(2, [[1]])
        await stream.start(3, [[2]])
        assert "2 requests are open" in (await stream.failed(3)).message
        one.engine.unwedge()
        for slot in (0, 2):
            await stream.finished(slot)
        await stream.start(4, [[1] * 50])  # above the limit, but alone
        await stream.finished(4)


async def test_a_hang_makes_it_not_serving_until_it_works_again() -> None:
    async with streaming(canary_interval_s=0.1, canary_timeout_s=0.3) as (one, stream):
        one.engine.wedge()
        await stream.start(0, [[1]])
        await one.health.until(NOT_SERVING)
        assert await one.conditions() == ["stuck"]
        one.engine.unwedge()
        await one.health.until(SERVING)
        await stream.finished(0)


async def test_an_engine_that_dies_ends_it_and_fails_what_is_open() -> None:
    async with streaming() as (one, stream):
        one.engine.wedge()
        await stream.start(0, [[1]] * 2048)
        await until(lambda: one.engine._waiting > 0)
        call = one.rerank([[1]])
        await until(lambda: one.engine._waiting > 64)
        one.engine.die()
        failed = await stream.failed(0)
        assert (failed.reason, failed.retryable) == ("ENGINE_FAILED", True)
        assert (await refusal(call)).reason == "ENGINE_FAILED"
        assert await asyncio.wait_for(one.code, 10) == FAILED


async def test_told_to_stop_it_finishes_what_is_open_and_takes_nothing_new() -> None:
    async with streaming() as (one, stream):
        one.engine.wedge()
        inputs = [[number] for number in range(200)]
        await stream.start(0, inputs)
        await until(lambda: one.engine._waiting > 0)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: stream.draining)
        await until(lambda: one.health.told[-1] == NOT_SERVING)

        async def refused() -> bool:
            async with embed_stream(one) as late:
                await late.start(0, [])  # which has its end at once in any case
                return (await late.failed(0)).reason == "WORKER_DRAINING"

        await until(refused)
        assert (await refusal(one.rerank([[1]]))).reason == "WORKER_DRAINING"
        await stream.start(1, [[5]])  # its peer had no notice when it opened the stream
        one.engine.unwedge()
        np.testing.assert_allclose(await stream.embedded(0), expected(inputs), rtol=2e-7)
        await stream.finished(1)
        await stream.call.done_writing()
        assert await asyncio.wait_for(one.code, 10) == DRAINED


async def test_its_requests_are_spans_and_its_numbers_are_scraped() -> None:
    trace = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    with collecting() as collector:
        port = free_port()
        changes: dict[str, Any] = {
            "otlp_endpoint": f"http://{collector.address}",
            "metrics_listen": f"127.0.0.1:{port}",
        }
        async with streaming(**changes) as (one, stream):
            before = await scrape(port)
            await stream.start(0, [[1, 2], [3]], trace=trace, request_id="mine")
            await stream.finished(0)
            await stream.start(1, [[]])
            await stream.failed(1)
            await one.rerank([[1, 2, 3]])
            after = await scrape(port)
            await stream.call.done_writing()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(one.code, 10) == DRAINED
        spans = [span for span in collector.spans if span.name == f"embeddings {MODEL}"]
    (traced,) = [span for span in spans if span.trace_id == "a" * 32]
    assert traced.parent_id == "b" * 16
    assert traced.attributes["millstream.request_id"] == "mine"
    assert traced.attributes["gen_ai.usage.input_tokens"] == 3
    assert [span.failed for span in spans].count(True) == 1
    assert len(spans) == 3

    def grown(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grown("millstream_vector_batches_total") == 2
    assert grown("millstream_vector_batched_inputs_total") == 3
    assert grown("millstream_vector_tokens_total") == 6
    outcomes = "millstream_worker_stream_requests_total"
    assert after.value(outcomes, role="embedding", outcome="INVALID_REQUEST") >= 1
    assert after.value("millstream_engine_info", role="embedding", engine="simulated") == 1


async def test_a_smaller_batch_than_the_engine_takes_can_be_set() -> None:
    config = replace(SimulatedEmbedderConfig(), max_batch_tokens=1000)
    async with streaming(config, VectorSettings(max_batch_tokens=6)) as (one, stream):
        await stream.start(0, [[1, 2, 3]] * 10)
        await stream.finished(0)
        assert max(map(sum, one.engine.batches)) == 6
