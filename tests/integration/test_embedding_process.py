"""Embedding workers as processes: on the simulated engine, and on SGLang beside a bare engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from millstream.v1 import embedding_pb2, embedding_pb2_grpc, worker_pb2, worker_pb2_grpc
from millstream_testing.waiting import until
from tests.support.engines.bare_vectors import BareProcess
from tests.support.models.vector_models import DIMENSIONS, Kind, make_vector_model
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess
from tests.support.telemetry.scraping import scrape
from tests.support.worker.embedding_worker import Stream, expected

INPUTS = [[5, 6, 7, 8], [9, 10, 11], [4], list(range(20, 120)), [8, 7, 6, 5]]
_SGLANG = [pytest.mark.sglang, pytest.mark.timeout(240)]


async def _info(channel: Any) -> worker_pb2.WorkerInfo:
    stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
    info: worker_pb2.WorkerInfo
    info = (await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
    return info


async def _logits(channel: Any, pairs: Sequence[Sequence[int]]) -> list[float]:
    stub: Any = embedding_pb2_grpc.EmbeddingServiceStub(channel)
    request = embedding_pb2.RerankRequest()
    for pair in pairs:
        request.pairs.add().ids.extend(pair)
    results = (await stub.Rerank(request, timeout=20)).results
    assert [r.score for r in results] == sorted((r.score for r in results), reverse=True)
    found = {result.index: result.logit for result in results}
    return [found[index] for index in range(len(pairs))]


async def test_a_simulated_worker_embeds_ranks_and_stops(tmp_path: Path) -> None:
    flags = {"engine": "simulated", "model_name": "pretend"}
    service = ServiceProcess("millstream_server.embedding", flags, tmp_path / "log").start()
    try:
        await service.until_serving()
        async with grpc.aio.insecure_channel(service.address) as channel:
            info = await _info(channel)
            assert (info.role, info.model) == (worker_pb2.WORKER_ROLE_EMBEDDING, "pretend")
            assert len(await _logits(channel, [[1], [2]])) == 2
            stream = Stream(channel)
            await stream.start(0, [[1, 2], [3]], dimensions=8)
            made = await stream.embedded(0)
            np.testing.assert_allclose(made, expected([[1, 2], [3]], 8), rtol=2e-7)
            await stream.close()
    finally:
        assert service.stop() == 0
    assert "Traceback" not in service.log.read_text()


@contextlib.contextmanager
def _bare(model: Path) -> Iterator[BareProcess]:
    bare = BareProcess(model)
    try:
        yield bare
    finally:
        bare.close()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=_SGLANG) for kind in ("qwen3", "xlmr_ranker")]
)
async def test_a_worker_on_sglang_equals_a_bare_engine_and_transformers(
    kind: str, tmp_path: Path
) -> None:
    model = make_vector_model(tmp_path / kind, cast("Kind", kind))
    port = free_port()
    flags = {"model_path": model, "metrics_listen": f"127.0.0.1:{port}"}
    service = ServiceProcess("millstream_server.embedding", flags, tmp_path / "log").start()
    try:
        await service.until_serving()
        with _bare(model) as bare:
            raw = await asyncio.to_thread(bare.ask, inputs=INPUTS)
            truth = np.array(await asyncio.to_thread(bare.ask, inputs=INPUTS, kind=kind))
        async with grpc.aio.insecure_channel(service.address) as channel:
            info = await _info(channel)
            assert (info.engine, info.model) == ("sglang", kind)
            if kind == "xlmr_ranker":
                made = await _logits(channel, INPUTS)
                np.testing.assert_allclose(made, raw, atol=1e-5)
                np.testing.assert_allclose(made, truth, atol=1e-4)
            else:
                assert tuple(info.embedding_model.dimensions) == DIMENSIONS
                await _embeds(channel, np.array(raw), truth)
        assert (await scrape(port)).value("sglang:prompt_tokens_total") > 100
    finally:
        assert service.stop(60) == 0
    assert "Traceback" not in service.log.read_text()


async def _embeds(channel: Any, raw: np.ndarray, truth: np.ndarray) -> None:
    """Compare whole and cut vectors; cancel a large batch."""
    stream = Stream(channel)
    await stream.start(0, INPUTS)
    await stream.start(1, INPUTS, dimensions=16)
    await stream.start(2, INPUTS, dimensions=16, normalize=False)
    made = await stream.embedded(0)
    np.testing.assert_allclose(made, raw, atol=1e-6)
    assert (made * truth).sum(axis=1).min() > 0.9999
    assert (await stream.failed(2)).fields == ["normalize"]  # SGLang always does
    cut = raw[:, :16] / np.linalg.norm(raw[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(await stream.embedded(1), cut, rtol=1e-5)
    await stream.start(3, [[7] * 500] * 2048)
    await until(lambda: bool(stream.vectors(3)))
    await stream.cancel(3)
    assert (await stream.failed(3)).reason == "CANCELLED"
    await stream.start(4, [[7] * 512, [], [5000]])
    failed = await stream.failed(4)
    assert failed.fields == [f"inputs[{index}].token_ids" for index in range(3)]
    await stream.start(5, INPUTS[:1])
    np.testing.assert_allclose(await stream.embedded(5), raw[:1], atol=1e-6)
    await stream.close()
