"""Every row of docs/metrics.md is emitted by a suite that works, and by the processes it names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from millstream.v1 import (
    decode_pb2_grpc,
    diffusion_pb2_grpc,
    embedding_pb2,
    embedding_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    kv_events_pb2,
    media_pb2,
    processor_pb2_grpc,
    worker_pb2_grpc,
)
from millstream_server.generation.ticket import TicketKey
from millstream_testing.waiting import until
from tests.support.clients import http_api
from tests.support.media.media_files import sha256, solid
from tests.support.media.media_suite import image, user
from tests.support.models.vision_models import make_vision_model
from tests.support.processes.ports import free_port
from tests.support.processes.simulated_suite import MODEL, SimulatedSuite
from tests.support.processes.suite import ServiceProcess
from tests.support.processor.chats import Conversation, completion, gather, options, start
from tests.support.telemetry.scraping import documented, scrape
from tests.support.worker.diffusion_worker import Stream as DiffusionStream
from tests.support.worker.worker_streams import decode_stream

FORGED = TicketKey(bytes(32)).mint("127.0.0.1", 1)
MAX_STREAMS = 8
_FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
STILL_ZERO = {
    "millstream_admission_queued_requests",
    "millstream_admission_queued_tokens",
    "millstream_admission_running_requests",
    "millstream_canary_failures_total",
    "millstream_certificate_expiry_timestamp_seconds",  # NaN: no TLS
    "millstream_draining",
    "millstream_engine_queued_requests",
    "millstream_engine_running_requests",
    "millstream_engine_used_blocks",
    "millstream_worker_stream_open_requests",
    "python_gc_objects_uncollectable_total",
}
"""Rows that may say 0 on a suite in good health: whoever has the series emits them.

Of all others whoever says more than 0: a metric without labels has a series in every process.
"""
NEEDS_A_CROWD = {
    "millstream_text_waiting_seconds",
    "millstream_transport_received_bytes",
    "millstream_transport_unsent_bytes",
}
"""Above 0 only while clients hold much. tests/contract/transport/test_connection_life.py and
tests/unit/processor_text have them."""
NEEDS_A_FAULT = {
    "millstream_discovery_failures_total",
    "millstream_discovery_source_failing",
    "millstream_redispatches_total",
    "millstream_repeated_losses_refused_total",
}
"""tests/unit/discovery/test_sources.py and tests/contract/test_redispatch.py have them."""
SGLANG_ONLY = {"sglang:cache_config_info"}
"""tests/integration/sglang_engine/test_metrics.py has these."""


class Heard:
    """Who has emitted which row so far."""

    def __init__(self) -> None:
        self._kinds: dict[str, set[str]] = {}

    async def listen(self, *services: ServiceProcess) -> None:
        """Scrape each once."""
        for service in services:
            kind = "Processor" if service.module.endswith("processor") else "worker"
            for name, value in await _values(service):
                if value or name in STILL_ZERO:
                    self._kinds.setdefault(name, set()).add(kind)

    @property
    def emitted_by(self) -> dict[str, str]:
        """Answer in the table's words."""
        return {
            name: "both" if len(kinds) > 1 else next(iter(kinds))
            for name, kinds in self._kinds.items()
        }


async def test_every_row_is_emitted_by_the_processes_it_names(tmp_path: Path) -> None:
    made = SimulatedSuite(tmp_path, {"canary_interval_s": 0.2})
    made.add_pair()
    small = made.add_worker("small", model="other", max_open_requests=1, simulated_step_s=0.05)
    made.add_media_workers("vision", make_vision_model(tmp_path / "vision", "qwen2_5_vl"))
    processor = made.add_processor(
        "processor", max_open_streams=MAX_STREAMS, policy="kv_aware", handoff="auto"
    )
    embedding = made.add_embedding_worker("embedding", **made.flags)
    diffusion = made.add_diffusion_worker("diffusion", simulated_step_s=0.4, **made.flags)
    for service in made.services.values():
        service.flags = {**service.flags, "metrics_listen": f"127.0.0.1:{free_port()}"}
    told = {row.name: row.emitted_by for row in documented().values()}
    for name in SGLANG_ONLY | NEEDS_A_CROWD | NEEDS_A_FAULT:
        del told[name]
    heard = Heard()
    with made.running():
        await made.until_connected()
        await _refuse_a_ticket(made.services["decode-1"].address)
        await _overload(small.address)
        await _rerank(embedding.address)
        await _follow_kv(made.services["decode-1"].address)
        await heard.listen(*made.services.values())  # while all models have their workers
        small.kill()
        async with (
            grpc.aio.insecure_channel(processor.address) as channel,
            _holding(made.services["encode-1"].address),
            _queueing(diffusion.address),
        ):
            stub: Any = processor_pb2_grpc.ProcessorServiceStub(channel)
            conversation = Conversation(stub)  # stays open, with what it said
            await conversation.say(start("hi", opts=options(8), model=MODEL))
            assert (await conversation.answer()).text == "ABCDEFGH"
            pictured = Conversation(stub)  # stays open too, with its picture
            await pictured.say(
                start(messages=[user(image(solid()))], opts=options(2), model="vision")
            )
            assert (await pictured.answer()).usage.media_tokens == 1
            await _burst(stub)
            async with http_api.client(processor.address) as openai:
                assert (await openai.models.list()).data

            async def as_told() -> bool:
                living = [service for service in made.services.values() if service.alive]
                await asyncio.gather(heard.listen(*living), _burst(stub))
                return heard.emitted_by == told

            try:
                await until(as_told, 10)
            except AssertionError:
                wrong = heard.emitted_by.items() ^ told.items()
                raise AssertionError(sorted(wrong)) from None


@contextlib.asynccontextmanager
async def _holding(address: str) -> AsyncIterator[None]:
    """Hold a result of an encode worker, and a file of which half has come."""
    picture = solid()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = encode_pb2_grpc.EncodeServiceStub(channel)
        stream = stub.Encode()
        for slot, data in enumerate((picture, b"")):
            item = encode_pb2.EncodeItem(
                slot=slot,
                modality=media_pb2.MODALITY_IMAGE,
                total_bytes=len(picture) if data else 1 << 20,
                data=data,
                sha256=sha256(data),
            )
            await stream.write(encode_pb2.EncodeRequest(start=item))
        await stream.read()
        yield
        stream.cancel()


@contextlib.asynccontextmanager
async def _queueing(address: str) -> AsyncIterator[None]:
    """Have an image made, and keep one request running and one waiting."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = diffusion_pb2_grpc.DiffusionServiceStub(channel)
        stream = DiffusionStream(stub)
        stream.read_on()
        await stream.start(0, steps=1)
        await stream.finished(0)
        for slot in (1, 2):
            await stream.start(slot, steps=50)
        await until(lambda: stream.slots[2].positions[-1:] == [1])  # a probe may be ahead, too
        yield
        await stream.close()


async def _rerank(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        request = embedding_pb2.RerankRequest()
        request.pairs.add().ids.append(1)
        assert (await stub.Rerank(request, timeout=20)).results


async def _follow_kv(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.WatchKvEvents(kv_events_pb2.WatchKvEventsRequest())
        assert (await call.read()).snapshot.last
        call.cancel()


async def _refuse_a_ticket(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        stream = decode_stream(stub)
        await stream.start(0, [1], ticket=FORGED)
        (refused,) = await stream.ended(0)
        assert (refused.reason, refused.fields) == ("INVALID_REQUEST", ["ticket.signature"])
        await stream.drain()


async def _overload(address: str) -> None:
    """Ask a worker for a second request, where one may be open."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        stream = decode_stream(stub)
        await stream.start(0, [1], max_new_tokens=400, ignore_eos=True)
        await stream.first_token(0)
        await stream.start(1, [1], max_new_tokens=1)
        (refused,) = await stream.ended(1)
        assert refused.reason == "OVERLOADED"
        await stream.cancel(0)
        await stream.drain()


async def _burst(stub: Any) -> None:
    """Ask a Processor for more than it takes, and keep it busy enough to gather tokens."""
    asked = completion("A" * 40, options(400, ignore_eos=True, n=8), model=MODEL)
    calls = [gather(stub.Complete(asked)) for _ in range(MAX_STREAMS + 2)]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    for end in ends:
        full = isinstance(end, grpc.aio.AioRpcError) and end.code() is _FULL
        if isinstance(end, BaseException) and not full:
            raise end


async def _values(service: ServiceProcess) -> list[tuple[str, float]]:
    """Read what a process says, by the table's names; a histogram says how often."""
    port = int(str(service.flags["metrics_listen"]).rpartition(":")[2])
    return [
        (family.name + ("_total" if family.type == "counter" else ""), sample.value)
        for family in (await scrape(port)).families.values()
        for sample in family.samples
        if family.type != "histogram" or sample.name.endswith("_count")
    ]
