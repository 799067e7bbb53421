"""Encode workers as processes: on a simulated tower, on one of transformers, in a decode worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import worker_pb2, worker_pb2_grpc
from millstream_server.encode.fetching.fetch import EmbeddingFetcher
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.generation.ticket import TicketKey
from millstream_server.media.items import Modality
from millstream_server.protobuf.media import ref_from_proto
from tests.support.media.media_files import solid, video
from tests.support.models.vision_models import make_vision_model
from tests.support.processes.suite import TICKET_KEY, ServiceProcess
from tests.support.worker.encode_worker import VIDEO, Stream

PNG = solid(size=(112, 84), color="orange")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "tiny", "qwen2_5_vl")


async def _encodes(service: ServiceProcess, *, fetches: bool) -> worker_pb2.WorkerInfo:
    """Encode an image, the same again, and a video; check what comes; return the worker's info."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        info: worker_pb2.WorkerInfo
        info = (await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        stream = Stream(channel)
        await stream.start(0, PNG)
        await stream.start(1, video(8), modality=VIDEO)
        image, clip = await stream.encoded(0), await stream.encoded(1)
        assert image.tokens * 4 == image.geometry.grid[1] * image.geometry.grid[2]
        assert clip.geometry.grid[0] == 2
        await stream.announce(2, PNG)
        assert (await stream.encoded(2)).cached
        await stream.start(3, PNG[:40])
        assert (await stream.error(3))[:2] == ("INVALID_REQUEST", ["data"])
        if fetches:
            tickets = EmbeddingTickets(TicketKey.from_hex(TICKET_KEY))
            fetcher = EmbeddingFetcher(tickets)
            item = ref_from_proto(image, Modality.IMAGE)
            tensor = await fetcher.fetch(tickets.mint(service.address, item))
            assert tensor.spec.shape[0] == image.tokens
            assert any(tensor.data.cast("B"))
            await fetcher.close()
        await stream.close()
        return info


@pytest.mark.parametrize("tower", ["simulated", "transformers"])
async def test_an_encode_worker_encodes_hands_out_and_stops(
    tower: str, model: Path, tmp_path: Path
) -> None:
    flags = {"engine": tower, "model_path": model, "device": "cpu"}
    service = ServiceProcess("millstream_server.encode", flags, tmp_path / "log")
    service.start()
    try:
        await service.until_serving()
        info = await _encodes(service, fetches=True)
        assert info.role == worker_pb2.WORKER_ROLE_ENCODE
        assert (info.engine, info.model) == (tower, "tiny")
    finally:
        assert service.stop() == 0
    assert "Traceback" not in service.log.read_text()


async def test_an_aggregated_worker_encodes_for_itself(model: Path, tmp_path: Path) -> None:
    flags = {"engine": "simulated", "model_path": model}
    service = ServiceProcess("millstream_server.decode", flags, tmp_path / "log")
    service.start()
    try:
        await service.until_serving()
        info = await _encodes(service, fetches=False)
        assert info.role == worker_pb2.WORKER_ROLE_AGGREGATED
        assert info.HasField("encoder")
    finally:
        assert service.stop() == 0
    off = ServiceProcess(
        "millstream_server.decode", {**flags, "encode_media": "false"}, tmp_path / "off"
    )
    off.start()
    try:
        await off.until_serving()
        async with grpc.aio.insecure_channel(off.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            info = (await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        assert not info.HasField("encoder")
    finally:
        assert off.stop() == 0
