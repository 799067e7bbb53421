"""Items on a stream to an encode worker that the test controls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from millstream.v1 import encode_pb2, encode_pb2_grpc, errors_pb2, media_pb2, tensor_pb2
from millstream_server.control.engine import EngineInfo, Role, WorkerDescription
from millstream_server.links.channel import Channel
from millstream_server.links.encode_stream import CHUNK_BYTES, INLINE_BYTES, EncodeStream
from millstream_server.links.grpc_channel import GrpcChannel
from millstream_server.links.slot_stream import Connection
from millstream_server.media.items import Content, Geometry, MediaFile, Modality
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    WorkerLostError,
)
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_testing.waiting import EOF, until


class PlayedEncoder(encode_pb2_grpc.EncodeServiceServicer):
    """Keeps what comes, sends what the test puts in; None ends the stream."""

    def __init__(self) -> None:
        self.controls: list[encode_pb2.EncodeRequest] = []
        self.responses: asyncio.Queue[encode_pb2.EncodeResponse | None] = asyncio.Queue()
        self.half_closed = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()

    async def Encode(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        reader = asyncio.ensure_future(self._read(context))
        try:
            while (response := await self.responses.get()) is not None:
                await context.write(response)
        finally:
            reader.cancel()

    async def Fetch(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        raise NotImplementedError

    async def _read(self, context: Any) -> None:
        while (control := await context.read()) is not EOF:
            self.controls.append(control)
            await self.reading.wait()
        self.half_closed.set()

    def send(self, **response: Any) -> None:
        self.responses.put_nowait(encode_pb2.EncodeResponse(**response))

    def kinds(self) -> list[str | None]:
        return [control.WhichOneof("control") for control in self.controls]


class Linked:
    """A played worker and a stream to it."""

    def __init__(self, worker: PlayedEncoder, channel: Channel) -> None:
        self.worker = worker
        self.view = WorkerView("here")
        self.drained = 0
        info = EngineInfo(engine="e", engine_version="1", max_running_requests=1)
        described = WorkerDescription(role=Role.ENCODE, model="m", engine=info)
        self.stream = EncodeStream(Connection(channel, described, self.view, self._on_draining))
        self.run = asyncio.ensure_future(self.stream.run())

    def _on_draining(self) -> None:
        self.drained += 1
        self.stream.finish()


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[Linked]:
    worker = PlayedEncoder()
    server = grpc.aio.server()
    encode_pb2_grpc.add_EncodeServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with contextlib.aclosing(GrpcChannel(f"127.0.0.1:{port}")) as channel:
        one = Linked(worker, channel)
        try:
            yield one
        finally:
            one.run.cancel()
            await asyncio.wait({one.run})
            one.stream.close()
            await server.stop(None)


def file(data: bytes | memoryview = b"image", **changes: Any) -> MediaFile:
    given: dict[str, Any] = {
        "modality": Modality.IMAGE,
        "data": data,
        "sha256": hashlib.sha256(data).digest(),
    }
    return MediaFile(**(given | changes))


def encoded(slot: int, lease: str = "lease", **changes: Any) -> encode_pb2.EncodedItem:
    ref = encode_pb2.EmbeddingRef(
        digest=b"d" * 32,
        tokens=4,
        geometry=media_pb2.MediaGeometry(grid=[1, 4, 4]),
        tensor=tensor_pb2.TensorSpec(element_type=tensor_pb2.ELEMENT_TYPE_BFLOAT16, shape=[4, 8]),
        content=media_pb2.EMBEDDING_CONTENT_ROWS,
        lease=lease,
    )
    ref.lease_left.FromMilliseconds(changes.pop("lease_ms", 60_000))
    ref.MergeFrom(encode_pb2.EmbeddingRef(**changes))
    return encode_pb2.EncodedItem(slot=slot, ref=ref)


async def test_a_small_file_goes_with_its_start_and_its_result_comes_back() -> None:
    async with linked() as one:
        trace = TraceContext("00-" + "1" * 32 + "-" + "2" * 16 + "-01")
        deadline = time.monotonic() + 9
        started = one.stream.start(file(salt="s", request_id="r", trace=trace, deadline_s=deadline))
        await until(lambda: bool(one.worker.controls))
        start = one.worker.controls[0].start
        assert (start.slot, start.data, start.total_bytes) == (0, b"image", 5)
        assert (start.cache_salt, start.request_id) == ("s", "r")
        assert start.modality == media_pb2.MODALITY_IMAGE
        assert start.sha256 == hashlib.sha256(b"image").digest()
        assert start.trace.traceparent == trace.traceparent
        assert 8 < start.timeout.ToNanoseconds() / 1e9 <= 9
        assert (one.view.in_flight, one.view.in_use) == (1, 1)
        one.worker.send(encoded=[encoded(0, cached=True)])
        item = await started.result()
        assert (item.tokens, item.lease, item.cached) == (4, "lease", True)
        assert item.geometry == Geometry(grid=(1, 4, 4))
        assert item.tensor == TensorSpec(ElementType.BFLOAT16, (4, 8))
        assert item.content is Content.ROWS
        assert (one.view.in_flight, one.view.in_use) == (0, 0)


async def test_a_large_files_bytes_go_only_when_they_are_wanted_and_take_turns() -> None:
    async with linked() as one:
        large, small = bytes(2 * CHUNK_BYTES + 7), b"x" * (INLINE_BYTES + 1)
        one.stream.start(file(large))
        one.stream.start(file(memoryview(small)))
        await until(lambda: len(one.worker.controls) == 2)
        assert [control.start.data for control in one.worker.controls] == [b"", b""]
        one.worker.send(wanted=[0, 1])
        await until(lambda: len(one.worker.controls) == 6)
        more = [(c.more.slot, len(c.more.data)) for c in one.worker.controls[2:]]
        assert more == [(0, CHUNK_BYTES), (1, len(small)), (0, CHUNK_BYTES), (0, 7)]
        received = b"".join(c.more.data for c in one.worker.controls if c.more.slot == 0)
        assert received == large


async def test_a_slow_worker_holds_the_bytes_back_and_controls_overtake_them() -> None:
    async with linked() as one:
        one.stream.start(file(bytes(160 * CHUNK_BYTES)))
        await until(lambda: len(one.worker.controls) == 1)
        one.worker.reading.clear()
        one.worker.send(wanted=[0])
        await until(lambda: len(one.worker.controls) == 2)
        one.stream.start(file())
        one.worker.reading.set()
        await until(lambda: one.worker.kinds().count("start") == 2)
        assert one.worker.kinds().index("start", 1) < 150
        await until(lambda: one.worker.kinds().count("more") == 160)


async def test_a_failed_item_sends_no_more_bytes_and_its_slot_is_used_again() -> None:
    async with linked() as one:
        failing = one.stream.start(file(bytes(160 * CHUNK_BYTES)))
        await until(lambda: len(one.worker.controls) == 1)
        one.worker.reading.clear()
        error = errors_pb2.RequestError(
            code=3, reason=errors_pb2.ERROR_REASON_INVALID_REQUEST, message="data: is no image"
        )
        one.worker.send(wanted=[0], errors=[encode_pb2.EncodeError(slot=0, error=error)])
        with pytest.raises(InvalidRequestError, match="is no image"):
            await failing.result()
        one.stream.start(file())
        one.worker.reading.set()
        await until(lambda: one.worker.kinds().count("start") == 2)
        assert one.worker.controls[-1].start.slot == 0
        assert len(one.worker.controls) < 150


async def test_cancel_is_sent_once_and_a_result_that_comes_late_is_given_back() -> None:
    async with linked() as one:
        started = one.stream.start(file())
        waiting = asyncio.ensure_future(started.result())
        await until(lambda: len(one.worker.controls) == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        started.cancel()
        assert (one.view.in_flight, one.view.in_use) == (1, 0)
        one.worker.send(encoded=[encoded(0, "late")])
        with pytest.raises(RequestCancelledError):
            await started.result()
        await until(lambda: len(one.worker.controls) == 3)
        assert one.worker.kinds() == ["start", "cancel", "release"]
        assert one.worker.controls[-1].release.lease == "late"
        started.cancel()
        assert one.view.in_flight == 0


async def test_a_result_that_crosses_a_cancelled_wait_is_given_back() -> None:
    async with linked() as one:
        waiting = asyncio.ensure_future(one.stream.start(file()).result())
        one.worker.send(encoded=[encoded(0, "crossed")])
        while one.view.in_flight == 0:
            await asyncio.sleep(0)
        while one.view.in_flight:  # the result is there, and who waits hasn't run yet
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: len(one.worker.controls) == 2)
        assert one.worker.kinds() == ["start", "release"]
        assert one.worker.controls[-1].release.lease == "crossed"


async def test_a_draining_worker_keeps_the_stream_until_its_results_are_released() -> None:
    async with linked() as one:
        first, second = one.stream.start(file()), one.stream.start(file())
        one.worker.send(encoded=[encoded(0, "a")], draining=True)
        await first.result()
        await until(lambda: one.drained == 1)
        one.worker.send(encoded=[encoded(1, "b", lease_ms=300)])
        await second.result()
        await until(lambda: len(one.worker.controls) == 2)
        assert not one.worker.half_closed.is_set()
        one.stream.release("a")
        one.stream.release("a")
        await asyncio.wait_for(one.worker.half_closed.wait(), 5)  # b's lease has expired
        assert one.worker.kinds() == ["start", "start", "release"]


async def test_a_stream_that_ends_fails_what_is_open() -> None:
    async with linked() as one:
        started = [one.stream.start(file()) for _ in range(3)]
        one.worker.responses.put_nowait(None)
        await asyncio.wait({one.run}, timeout=5)
        assert one.run.done()
        one.run.exception()  # gRPC may report a start that was being written
        one.stream.close()
        for each in started:
            with pytest.raises(WorkerLostError, match="send it again"):
                await each.result()
        assert (one.view.in_flight, one.view.in_use) == (0, 0)


async def test_a_result_that_cannot_be_read_fails_alone_and_is_given_back() -> None:
    async with linked() as one:
        bad, good = one.stream.start(file()), one.stream.start(file())
        one.worker.send(encoded=[encoded(0, "a", content=99), encoded(1, "b")])
        with pytest.raises(InternalError, match="quote id"):
            await bad.result()
        assert (await good.result()).lease == "b"
        await until(lambda: len(one.worker.controls) == 3)
        assert one.worker.controls[-1].release.lease == "a"


@pytest.mark.parametrize("response", [{"wanted": [5]}, {"encoded": [encoded(5)]}])
async def test_a_worker_that_breaks_the_rules_loses_the_stream(response: dict[str, Any]) -> None:
    async with linked() as one:
        lost = one.stream.start(file())
        one.worker.send(**response)
        await asyncio.wait({one.run}, timeout=5)
        assert isinstance(one.run.exception(), ExceptionGroup)
        one.stream.close()
        with pytest.raises(WorkerLostError):
            await lost.result()
