"""Workers of other abilities can be drained, too; they have no other operations."""

from __future__ import annotations

from typing import Any

import grpc

from millstream.v1 import engine_control_pb2_grpc
from tests.support.media.media_files import solid
from tests.support.wire.failures import refusal
from tests.support.wire.long_streams import NOT_SERVING, SERVING
from tests.support.worker import diffusion_worker, encode_worker
from tests.support.worker.controlled_worker import Followed, pb
from tests.support.worker.embedding_worker import embed_stream, embedding_worker
from tests.support.worker.hosted_worker import HostedWorker


async def _drained(one: HostedWorker) -> None:
    async with grpc.aio.insecure_channel(one.settings.admin_listen) as channel:
        stub: Any = engine_control_pb2_grpc.EngineControlServiceStub(channel)
        await Followed(stub.Drain(pb.DrainRequest())).ended()
        await one.health.until(NOT_SERVING)
        state = (await stub.GetEngineState(pb.GetEngineStateRequest())).state
        assert (state.drained, list(state.supported)) == (True, ["Drain", "Undrain"])


async def _back(one: HostedWorker) -> None:
    async with grpc.aio.insecure_channel(one.settings.admin_listen) as channel:
        stub: Any = engine_control_pb2_grpc.EngineControlServiceStub(channel)
        await stub.Undrain(pb.UndrainRequest())
        await one.health.until(SERVING)


async def test_a_drained_embedding_worker_refuses_until_it_is_back() -> None:
    async with embedding_worker() as one, embed_stream(one) as stream:
        await stream.start(0, [[5]])
        await stream.finished(0)
        await _drained(one)
        await stream.start(1, [[5]])
        failed = await stream.failed(1)
        assert (failed.reason, failed.retryable) == ("WORKER_PAUSED", True)
        refused = await refusal(one.rerank([[5]]))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_PAUSED")
        assert refused.retry_delay_s == 1.0
        assert not stream.draining
        await _back(one)
        await stream.start(2, [[5]])
        await stream.finished(2)


async def test_a_drained_encode_worker_refuses_until_it_is_back() -> None:
    async with encode_worker.streaming() as (one, stream):
        file = solid(size=(56, 56), color="#0a141e")
        await stream.start(0, file)
        await stream.release((await stream.encoded(0)).lease)
        await _drained(one)
        await stream.start(1, file)
        assert (await stream.error(1))[0] == "WORKER_PAUSED"
        await _back(one)
        await stream.start(2, file)
        await stream.encoded(2)
        assert not any(response.draining for response in stream.responses)


async def test_a_drained_diffusion_worker_refuses_until_it_is_back() -> None:
    async with diffusion_worker.streaming() as (one, stream):
        await _drained(one)
        await stream.start(0)
        assert (await stream.ended(0)).reason == "WORKER_PAUSED"
        await _back(one)
        await stream.start(1)
        await stream.finished(1)
