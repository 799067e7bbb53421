"""The life of an encode worker: its info, hangs, drains, callers that die, metrics."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from typing import Any

import grpc
import pytest

from millstream.v1 import encode_pb2, encode_pb2_grpc, media_pb2, worker_pb2
from millstream_server.encode.fetching.fetch import EmbeddingFetcher
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.encode.worker.core import EncodeOptions
from millstream_server.engines.simulated.encoder import SimulatedEncoderConfig
from millstream_server.links.encode_stream import EncodeStream
from millstream_server.links.grpc_channel import GrpcChannel
from millstream_server.links.link import WorkerLink
from millstream_server.media.items import Content, MediaFile, MediaLimits, Modality
from millstream_server.protobuf.media import ref_from_proto
from millstream_server.runtime.errors import (
    InvalidRequestError,
    RequestCancelledError,
    WorkerLostError,
)
from millstream_server.runtime.lifecycle.main import DRAINED, FAILED
from millstream_testing.waiting import until
from tests.support.media.media_files import solid
from tests.support.processes.ports import free_port
from tests.support.telemetry.otlp_collector import collecting
from tests.support.telemetry.scraping import scrape
from tests.support.wire.failures import refusal
from tests.support.wire.long_streams import NOT_SERVING, SERVING
from tests.support.worker.encode_worker import (
    IMAGE,
    KEY,
    MODEL,
    Setup,
    Stream,
    encode_stream,
    encode_worker,
    streaming,
)
from tests.support.worker.hosted_worker import SOON

PNG = solid(size=(56, 56), color="#0a141e")
LARGE = b"".join([solid(size=(28, 28)), bytes(3 << 20)])  # a PNG with bytes behind its end


async def test_it_says_what_it_encodes_and_how_loaded_it_is() -> None:
    limits = MediaLimits(max_pixels=999, max_frames=7, max_video_s=1.5)
    setup = Setup(SimulatedEncoderConfig(max_item_tokens=77), limits)
    async with streaming(setup) as (one, stream):
        info = (await one.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        assert (info.role, info.model) == (worker_pb2.WORKER_ROLE_ENCODE, MODEL)
        assert (info.engine, info.max_running_requests, info.vocab_size) == ("simulated", 64, 0)
        encoder = info.encoder
        assert set(encoder.modalities) == {
            media_pb2.MODALITY_IMAGE,
            media_pb2.MODALITY_VIDEO,
        }
        assert (encoder.max_pixels, encoder.max_frames, encoder.max_item_tokens) == (999, 7, 77)
        assert encoder.max_item_bytes == limits.max_item_bytes
        assert encoder.max_video.ToMilliseconds() == 1500
        assert encoder.content == media_pb2.EMBEDDING_CONTENT_ROWS
        one.tower.wedge()
        for slot in range(3):
            await stream.start(slot, PNG, cache_salt=str(slot))
            await until(lambda: one.hosted.pipeline.batcher.running == 1)
        await until(lambda: one.hosted.pipeline.batcher.queued == 2)
        load = (await one.about.WatchLoad(worker_pb2.WatchLoadRequest()).read()).load
        assert (load.running_requests, load.queued_requests) == (1, 2)


async def test_an_item_before_the_model_is_loaded_is_refused() -> None:
    port = free_port()
    setup = Setup(SimulatedEncoderConfig(load_s=1.0))

    async def early() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", SOON) as channel:
            method: Any = encode_pb2_grpc.EncodeServiceStub(channel).Encode
            call = method(wait_for_ready=True)
            item = encode_pb2.EncodeItem(modality=IMAGE, total_bytes=len(PNG), data=PNG)
            await call.write(encode_pb2.EncodeRequest(start=item))
            (error,) = (await call.read()).errors
            assert error.error.retryable
            assert "still loading" in error.error.message
            call.cancel()

    told = asyncio.ensure_future(early())
    async with encode_worker(setup, listen=f"127.0.0.1:{port}"):
        await told


async def test_a_hang_makes_it_not_serving_until_it_works_again() -> None:
    async with streaming(canary_interval_s=0.1, canary_timeout_s=0.3) as (one, stream):
        assert await one.conditions() == []
        one.tower.wedge()
        await stream.start(0, PNG)
        await one.health.until(NOT_SERVING)
        assert await one.conditions() == ["stuck"]
        one.tower.unwedge()
        await one.health.until(SERVING)
        await stream.encoded(0)


async def test_a_tower_that_stays_stuck_ends_it() -> None:
    changes: dict[str, Any] = {"canary_interval_s": 0.1, "canary_timeout_s": 0.2}
    async with streaming(stuck_limit_s=0.2, **changes) as (one, stream):
        one.tower.wedge()
        await stream.start(0, PNG)
        assert await asyncio.wait_for(one.code, 10) == FAILED
        await until(lambda: stream.ended is not None or bool(stream.ends(0)))


async def test_told_to_stop_it_finishes_its_items_and_keeps_leased_results() -> None:
    async with streaming() as (one, stream):
        await stream.start(0, PNG)
        lease = (await stream.encoded(0)).lease
        one.tower.wedge()
        await stream.start(1, solid(size=(28, 28)))
        await until(lambda: one.hosted.pipeline.batcher.running == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: any(response.draining for response in stream.responses))
        assert one.health.told[-1] == NOT_SERVING

        async def refused() -> bool:
            async with encode_stream(one) as late:
                await late.start(0, PNG, cache_salt="late", request_id="late")
                await until(lambda: bool(late.ends(0)) or one.hosted.pipeline.batcher.queued > 0)
                if not late.ends(0):
                    return False  # taken: peers may not have heard yet
                assert (await late.error(0))[0] == "WORKER_DRAINING"
                return True

        await until(refused)
        one.tower.unwedge()
        await stream.encoded(1)
        assert one.pinned_bytes > 0
        assert not one.code.done()
        await stream.release(lease)
        await stream.release(stream.ends(1)[0].lease)
        await until(lambda: one.pinned_bytes == 0)
        await stream.call.done_writing()
        assert await asyncio.wait_for(one.code, 10) == DRAINED


_CALLER = """
import sys, time, grpc
sys.path[:0] = sys.argv[3:]
from millstream.v1 import encode_pb2, encode_pb2_grpc
data = bytes.fromhex(sys.argv[2])
item = encode_pb2.EncodeItem(modality="MODALITY_IMAGE", total_bytes=len(data), data=data)
def requests():
    yield encode_pb2.EncodeRequest(start=item)
    time.sleep(60)
with grpc.insecure_channel(sys.argv[1]) as channel:
    responses = encode_pb2_grpc.EncodeServiceStub(channel).Encode(requests())
    print(next(responses).encoded[0].ref.lease, flush=True)
    time.sleep(60)
"""


async def test_a_caller_that_is_killed_frees_its_leases() -> None:
    async with encode_worker() as one:
        caller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CALLER, one.settings.listen, PNG.hex(), *sys.path),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert caller.stdout is not None
            assert len(await asyncio.wait_for(caller.stdout.readline(), 30)) > 32
            assert one.pinned_bytes > 0
        finally:
            caller.kill()
            await caller.wait()
        await until(lambda: one.pinned_bytes == 0)


async def test_a_fetch_gets_the_rows_and_outlives_the_lease() -> None:
    async with streaming() as (one, stream):
        await stream.start(0, PNG)
        ref = await stream.encoded(0)
        item = ref_from_proto(ref, Modality.IMAGE)
        tickets = EmbeddingTickets(KEY)
        fetcher = EmbeddingFetcher(tickets)
        try:
            tensor = await fetcher.fetch(tickets.mint(one.settings.listen, item))
            assert tensor.spec == item.tensor
            assert list(tensor.data.cast("B").cast("f")[:4]) == [10, 20, 30, 0]
        finally:
            await fetcher.close()
        method: Any = encode_pb2_grpc.EncodeServiceStub(one.channel).Fetch
        unsigned = encode_pb2.FetchRequest(start=encode_pb2.FetchStart())

        async def requests() -> Any:
            yield unsigned

        told = await refusal(method(requests()))
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT


# ---- with the Processor's end --------------------------------------------------------------------


class Linked:
    """A link to a worker, as a Processor has it."""

    def __init__(self, address: str) -> None:
        self.link = WorkerLink(address, GrpcChannel, lambda: None)
        self.task = asyncio.ensure_future(self.link.run())

    async def __aenter__(self) -> WorkerLink:
        await until(lambda: self.link.view.description is not None)
        return self.link

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


def _media(link: WorkerLink) -> EncodeStream:
    assert link.streams is not None
    assert link.streams.media is not None
    return link.streams.media


def file(data: bytes, **changes: Any) -> MediaFile:
    digest = hashlib.sha256(data).digest()
    return MediaFile(modality=Modality.IMAGE, data=data, sha256=digest, **changes)


async def test_a_link_sends_files_of_any_size_and_gets_results() -> None:
    async with encode_worker() as one, Linked(one.settings.listen) as link:
        assert link.view.last_description is not None
        encoder = link.view.last_description.encoder
        assert encoder is not None
        stream = _media(link)
        small, large = stream.start(file(PNG)), stream.start(file(LARGE))
        item = await small.result()
        assert (item.tokens, item.content) == (4, Content.ROWS)
        assert (await large.result()).tokens == 1
        again = await stream.start(file(LARGE)).result()
        assert again.cached
        for lease in (item.lease, (await large.result()).lease, again.lease):
            stream.release(lease)
        await until(lambda: one.pinned_bytes == 0)
        with pytest.raises(InvalidRequestError) as caught:
            await stream.start(file(b"no image")).result()
        assert [violation.field for violation in caught.value.violations] == ["data"]


async def test_a_links_cancel_reaches_the_worker_and_its_end_fails_what_is_open() -> None:
    async with encode_worker() as one:
        async with Linked(one.settings.listen) as link:
            one.tower.wedge()
            stream = _media(link)
            first, second = stream.start(file(PNG)), stream.start(file(LARGE))
            await until(lambda: one.hosted.open_items() == 2)
            first.cancel()
            with pytest.raises(RequestCancelledError):
                await first.result()
            await until(lambda: one.hosted.open_items() == 1)
        with pytest.raises(WorkerLostError):
            await second.result()
        await until(lambda: one.hosted.open_items() == 0)


async def test_a_drain_waits_until_the_links_results_are_released() -> None:
    async with encode_worker() as one, Linked(one.settings.listen) as link:
        stream = _media(link)
        lease = (await stream.start(file(PNG)).result()).lease
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: link.view.description is None)
        await until(lambda: one.health.told[-1] == NOT_SERVING)
        assert one.pinned_bytes > 0
        stream.release(lease)
        assert await asyncio.wait_for(one.code, 10) == DRAINED


# ---- metrics and spans ---------------------------------------------------------------------------


async def _one_of_each(stream: Stream) -> None:
    await stream.start(0, PNG)
    await stream.encoded(0)
    await stream.announce(1, PNG)
    await stream.encoded(1)
    await stream.start(2, b"no image")
    await stream.end(2)


async def test_its_items_are_spans_and_its_numbers_are_scraped() -> None:
    trace = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    with collecting() as collector:
        changes = {"otlp_endpoint": f"http://{collector.address}"}
        metrics_port = free_port()
        changes["metrics_listen"] = f"127.0.0.1:{metrics_port}"
        async with streaming(Setup(options=EncodeOptions(lease_s=60)), **changes) as (one, stream):
            before = await scrape(metrics_port)
            await _one_of_each(stream)
            await stream.start(3, PNG, trace=trace, cache_salt="traced", request_id="mine")
            await stream.encoded(3)
            after = await scrape(metrics_port)
            await stream.call.done_writing()
            await until(lambda: one.pinned_bytes == 0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(one.code, 10) == DRAINED
        spans = [span for span in collector.spans if span.name == f"encode {MODEL}"]
    (traced,) = [span for span in spans if span.trace_id == "a" * 32]
    assert traced.parent_id == "b" * 16
    assert traced.attributes["millstream.request_id"] == "mine"
    assert traced.attributes["millstream.encode.tokens"] == 4
    stages = {"upload", "queue", "decode", "prepare", "batch_queue", "forward"}
    assert {f"millstream.encode.{stage}_s" for stage in stages} <= traced.attributes.keys()
    assert [span.failed for span in spans].count(True) == 1

    def grown(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grown("millstream_encode_lookups_total", result="hit") == 1
    assert grown("millstream_encode_lookups_total", result="miss") == 3
    assert grown("millstream_encode_batches_total") == 2
    assert grown("millstream_encode_batched_items_total") == 2
    for stage in stages - {"upload"}:
        counted = "millstream_encode_stage_duration_seconds_count"
        assert grown(counted, stage=stage) >= 2
    assert after.value("millstream_encode_leases") == 3
    assert after.value("millstream_encode_store_bytes") > 0
    assert after.value("millstream_encode_upload_bytes") == 0
    outcomes = "millstream_worker_stream_requests_total"
    assert after.value(outcomes, role="encode", outcome="INVALID_REQUEST") >= 1
