"""A Processor's prefix index follows workers' KV events over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from millstream.v1 import kv_events_pb2, worker_pb2_grpc
from millstream_server.engines.simulated.engine import SimulatedConfig
from millstream_server.generation.output import CollectingSink
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.kv_cache.events import (
    BlocksStored,
    CacheCleared,
    KvChanges,
    KvMessage,
    KvSnapshotPart,
)
from millstream_server.links.fleet import Fleet
from millstream_server.links.grpc_channel import GrpcChannel
from millstream_server.links.kv_watch import KvWatch
from millstream_server.protobuf.kv_events import kv_message_to_proto
from millstream_server.routing.discovery.sources import StaticDiscovery
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import PlannedLeg, RoutingRequest
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.prefix.prefixes import Prefixes
from millstream_server.routing.router import Router
from millstream_server.routing.workers import WorkerView
from millstream_testing.in_process import MODEL, worker
from millstream_testing.waiting import until
from tests.support.processor.views import description
from tests.support.telemetry.logged import events as logged

PROMPT = list(range(10, 50))


@contextlib.asynccontextmanager
async def _routed(*addresses: str) -> AsyncIterator[tuple[Router, Fleet, Prefixes]]:
    prefixes = Prefixes()
    router = Router(lambda: make_policy(PolicyName.KV_AWARE, prefixes), prefixes=prefixes)
    fleet = Fleet(StaticDiscovery(addresses), router)
    fleet.open()
    try:
        await until(lambda: sum(router.connected(MODEL).values()) == len(addresses))
        yield router, fleet, prefixes
    finally:
        await fleet.close()


async def _run(router: Router, fleet: Fleet, token_ids: list[int]) -> tuple[PlannedLeg, int]:
    """Route a prompt and run it; return its leg, and what was cached."""
    (leg,) = router.plan(RoutingRequest(model=MODEL, token_ids=token_ids)).legs
    request = GenerationRequest(
        prompt=Prompt(token_ids),
        sampling=Sampling(max_new_tokens=2),
        dp_rank=leg.place.dp_rank,
        expected_cached_tokens=leg.cached_tokens,
    )
    sink = CollectingSink()
    fleet.generate(leg.place.worker.address, request, sink)
    assert leg.place.in_flight == leg.place.worker.in_flight == 1
    assert leg.place.pending_tokens == len(token_ids) - leg.cached_tokens
    await sink.first_token()
    assert leg.place.pending_tokens == 0
    finish = await sink.result()
    assert leg.place.in_flight == leg.place.worker.in_flight == 0
    return leg, finish.cached_tokens


async def test_what_a_worker_has_cached_is_known_and_used() -> None:
    config = SimulatedConfig(block_size=4, dp_size=2, vocab_size=100, context_length=200)
    async with worker(config) as one, worker(config) as other:
        async with _routed(one.address, other.address) as (router, fleet, prefixes):
            index = prefixes.of(MODEL).index
            first, cached = await _run(router, fleet, PROMPT)
            assert (first.cached_tokens, cached) == (0, 0)
            await until(lambda: index.blocks >= len(PROMPT) // 4)
            assert index.held(first.place.member)
            again, cached = await _run(router, fleet, [*PROMPT, 60, 61])
            assert again.place is first.place
            assert again.cached_tokens == cached == len(PROMPT)
            others = {(await _run(router, fleet, [n] * 40))[0].place.name for n in range(3)}
            assert len({*others, first.place.name}) == 4, "each rank of each worker is a place"
        async with _routed(one.address, other.address) as (router, _, prefixes):
            index = prefixes.of(MODEL).index
            await until(lambda: index.blocks >= 4 * 10)
            plan = router.plan(RoutingRequest(model=MODEL, token_ids=PROMPT))
            assert plan.places == (first.place.name,), "another Processor finds it, too"


@dataclass
class _Events(worker_pb2_grpc.WorkerServiceServicer):
    """A worker whose streams of KV events the test plays: one list of messages each."""

    streams: list[list[KvMessage]]
    requests: list[kv_events_pb2.WatchKvEventsRequest] = field(default_factory=list)

    async def WatchKvEvents(
        self, request: kv_events_pb2.WatchKvEventsRequest, context: Any
    ) -> AsyncIterator[kv_events_pb2.WatchKvEventsResponse]:
        self.requests.append(request)
        for message in self.streams.pop(0):
            yield kv_message_to_proto(message)
        if not self.streams:
            await asyncio.Event().wait()


def _snapshot(sequence: int, *hashes: int) -> KvMessage:
    return KvMessage(
        0, "log", sequence, KvSnapshotPart(first=True, last=True, stored=(BlocksStored(hashes),))
    )


def _stored(sequence: int, *hashes: int) -> KvMessage:
    return KvMessage(0, "log", sequence, KvChanges(sequence, (BlocksStored(hashes),)))


_Watched = tuple[Prefixes, WorkerView, asyncio.Task[None]]


@contextlib.asynccontextmanager
async def _watched(events: _Events) -> AsyncIterator[_Watched]:
    """Follow a played worker."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(events, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    prefixes, view = Prefixes(), WorkerView(f"127.0.0.1:{port}")
    watch = KvWatch(prefixes, view)
    async with contextlib.aclosing(GrpcChannel(view.address)) as channel:
        running = asyncio.ensure_future(watch.run(channel, description(tells_kv=True)))
        try:
            yield prefixes, view, running
        finally:
            running.cancel()
            await asyncio.wait([running])
    await server.stop(0)


async def test_a_lost_stream_goes_on_where_it_ended_and_a_gap_needs_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millstream_server.links.kv_watch._RETRY_S", 0.01)
    # The other RPCs are not called.
    events = _Events(  # type: ignore[abstract]
        [
            [_snapshot(4, 1, 2), _stored(5, 3)],
            [_stored(6, 4), _stored(8, 6)],
            [_snapshot(8, 1, 2, 3, 4, 5, 6)],
        ]
    )
    async with _watched(events) as (prefixes, view, _):
        await until(lambda: len(events.requests) == 3)
        index = prefixes.of("m").index
        await until(lambda: index.held(view.member) == {1, 2, 3, 4, 5, 6})
    asked = [[(p.log_id, p.sequence) for p in request.positions] for request in events.requests]
    assert asked == [[], [("log", 5)], []]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (_stored(5, *range(1 << 17)), "1048603 bytes; 1048576 are"),
        (
            KvMessage(0, "log", 5, KvChanges(5, (CacheCleared(),) * 65_537)),
            "65537 events; 65536 are",
        ),
    ],
    ids=["bytes", "events"],
)
async def test_a_worker_whose_messages_are_too_large_is_one_without_events(
    message: KvMessage, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    # The other RPCs are not called.
    events = _Events([[_snapshot(4, 1, 2), message]])  # type: ignore[abstract]
    async with _watched(events) as (prefixes, view, running):
        await asyncio.wait_for(running, 10)
        assert not prefixes.of("m").index.held(view.member)
    (line,) = logged(caplog, "a worker's KV events can't be used")
    assert problem in line["problem"]
    assert len(events.requests) == 1


async def test_a_worker_without_events_is_not_asked_for_them() -> None:
    watch = KvWatch(Prefixes(), WorkerView("nowhere:1"))
    await watch.run(None, description(tells_kv=False))  # type: ignore[arg-type]
