"""WatchKvEvents: how a worker tells what its prefix caches hold, and how it refuses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from millstream.v1 import kv_events_pb2, worker_pb2
from millstream_server.control.engine import Role, WorkerDescription
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, Medium
from millstream_server.kv_cache.hashing import block_hashes
from millstream_server.worker.host import WorkerPlan
from millstream_server.worker.kv_events.log import KvEventLog
from millstream_server.worker_info import description_to_proto
from millstream_testing.in_process import InProcessWorker, plan_of, worker
from millstream_testing.waiting import until
from tests.support.wire.failures import refusal
from tests.support.worker.worker_streams import decode_stream

ASK = worker_pb2.GetWorkerInfoRequest()
RING = 65_536
BLOCK_SIZE = 16


def _describe(description: WorkerDescription, *, tells: bool) -> worker_pb2.WorkerInfo:
    info = description_to_proto(description)
    info.dp_start, info.dp_size = 4, 2
    info.block_hashing = int(tells)  # type: ignore[assignment]
    return info


@contextlib.asynccontextmanager
async def telling_worker(
    log: KvEventLog | None, *, tells: bool = True, loaded: bool = True
) -> AsyncIterator[InProcessWorker]:
    """Run a worker with the ranks 4 and 5, whose caches change as the test says."""

    def make(engine: SimulatedEngine, role: Role) -> WorkerPlan[GeneratorInfo]:
        return replace(plan_of(engine, role), kv=log, describe=partial(_describe, tells=tells))

    async with worker(make=make, loaded=loaded) as started:
        yield started


def watch(
    w: InProcessWorker, *positions: kv_events_pb2.KvEventsPosition, ranks: Sequence[int] = ()
) -> Any:
    request = kv_events_pb2.WatchKvEventsRequest(dp_ranks=ranks, positions=positions)
    return w.about.WatchKvEvents(request)


def position(message: kv_events_pb2.WatchKvEventsResponse) -> kv_events_pb2.KvEventsPosition:
    return kv_events_pb2.KvEventsPosition(
        dp_rank=message.dp_rank, log_id=message.log_id, sequence=message.sequence
    )


async def test_it_is_not_served_before_the_model_is_loaded() -> None:
    async with telling_worker(KvEventLog(), loaded=False) as w:
        early = await refusal(watch(w))
    assert (early.code, early.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
    assert early.retryable
    assert early.retry_delay_s == 1


@pytest.mark.parametrize(("log", "tells"), [(None, True), (KvEventLog(), False)])
async def test_a_worker_without_events_refuses(log: KvEventLog | None, *, tells: bool) -> None:
    async with telling_worker(log, tells=tells) as w:
        failed = await refusal(watch(w))
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (failed.reason, failed.fields) == ("UNSUPPORTED_FEATURE", ())
    assert not failed.retryable


async def test_ranks_that_the_worker_does_not_have_are_refused() -> None:
    async with telling_worker(KvEventLog()) as w:
        failed = await refusal(watch(w, ranks=[5, 0, 6]))
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.reason == "INVALID_REQUEST"
    assert failed.fields == ("dp_ranks[1]", "dp_ranks[2]")
    assert "the ranks 4 to 5, not 6" in failed.message


async def test_a_request_that_would_hold_much_memory_is_refused() -> None:
    at = kv_events_pb2.KvEventsPosition(dp_rank=4, log_id="x" * (256 << 10), sequence=2**64 - 1)
    async with telling_worker(KvEventLog()) as w:
        failed = await refusal(watch(w, at))
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("positions",))
    assert "bytes; 262144 are allowed" in str(failed)


async def test_each_rank_begins_with_a_snapshot_and_goes_on_with_events() -> None:
    log = KvEventLog()
    log.changed(4, [BlocksStored([1, 2]), BlocksStored([3], 2, Medium.HOST, "sql")])
    async with telling_worker(log) as w:
        call = watch(w)
        first, second = await call.read(), await call.read()
        assert [m.dp_rank for m in (first, second)] == [4, 5]
        assert first.log_id != second.log_id
        assert (first.sequence, first.first_sequence, second.sequence) == (1, 0, 0)
        assert first.snapshot.first
        assert first.snapshot.last
        chain, child = first.snapshot.stored
        assert (list(chain.hashes), chain.HasField("parent_hash")) == ([1, 2], False)
        assert (chain.medium, chain.adapter) == (kv_events_pb2.KV_MEDIUM_DEVICE, "")
        assert (list(child.hashes), child.parent_hash) == ([3], 2)
        assert (child.medium, child.adapter) == (kv_events_pb2.KV_MEDIUM_HOST, "sql")
        assert second.snapshot.last
        assert not second.snapshot.stored
        log.changed(5, [BlocksRemoved([9], Medium.DISK), CacheCleared()])
        told = await call.read()
        assert (told.dp_rank, told.log_id) == (5, second.log_id)
        assert (told.first_sequence, told.sequence) == (1, 1)
        removed, cleared = told.events.events
        assert removed.removed == kv_events_pb2.KvBlocksRemoved(
            hashes=[9], medium=kv_events_pb2.KV_MEDIUM_DISK
        )
        assert cleared.WhichOneof("event") == "cleared"
        call.cancel()


async def test_a_reader_goes_on_where_it_was_and_a_restarted_worker_sends_a_snapshot() -> None:
    log = KvEventLog()
    async with telling_worker(log) as w:
        call = watch(w, ranks=[5])
        at = position(await call.read())
        call.cancel()
        await until(lambda: not log.rank(5)._listeners)
        for block in range(3):
            log.changed(5, [BlocksStored([block])])
        call = watch(w, at, ranks=[5])
        missed = await call.read()
        assert (missed.first_sequence, missed.sequence) == (1, 3)
        assert [list(event.stored.hashes) for event in missed.events.events] == [[0], [1], [2]]
        call.cancel()
    async with telling_worker(KvEventLog()) as w:
        call = watch(w, position(missed), kv_events_pb2.KvEventsPosition(dp_rank=9), ranks=[5])
        anew = await call.read()
        assert anew.snapshot.last
        assert anew.log_id != at.log_id
        call.cancel()


async def test_a_reader_that_stops_costs_bounded_memory_and_then_gets_a_snapshot() -> None:
    log = KvEventLog(RING)
    told_bytes = 0
    async with telling_worker(log) as w:
        call = watch(w, ranks=[4])
        await call.read()
        for start in range(0, 40 * 32_768, 32_768):
            blocks = range(start, start + 32_768)
            log.changed(4, [BlocksStored(blocks)])
            log.changed(4, [BlocksRemoved(blocks)])
            told_bytes += 2 * 8 * len(blocks)
            await w.about.GetWorkerInfo(ASK)  # the worker has had the time to send
        assert log.rank(4).ring.hashes <= RING
        log.changed(4, [BlocksStored([7]), BlocksStored([8])])
        waiting_bytes = 0
        while not (message := await call.read()).HasField("snapshot"):
            waiting_bytes += message.ByteSize()
        assert waiting_bytes < told_bytes / 3
        assert [list(stored.hashes) for stored in message.snapshot.stored] == [[7], [8]]
        assert message.sequence == log.rank(4).ring.last
        call.cancel()


async def test_a_workers_own_engine_tells_blocks_by_hashes_that_anyone_can_compute() -> None:
    prompt = list(range(1, 41))
    async with worker() as w:
        call = w.about.WatchKvEvents(kv_events_pb2.WatchKvEventsRequest())
        assert not (await call.read()).snapshot.stored
        stream = decode_stream(w.decode)
        await stream.start(0, prompt, max_new_tokens=1)
        await stream.ended(0)
        wanted = set(block_hashes(prompt, BLOCK_SIZE))
        while wanted:
            for event in (await call.read()).events.events:
                wanted -= set(event.stored.hashes)
        call.cancel()
        load = (await w.about.WatchLoad(worker_pb2.WatchLoadRequest()).read()).load
        await stream.start(1, prompt, max_new_tokens=1)
        await stream.ended(1)
        again = (await w.about.WatchLoad(worker_pb2.WatchLoadRequest()).read()).load
    assert load.cached_tokens_total == 0
    assert again.cached_tokens_total == len(prompt) // BLOCK_SIZE * BLOCK_SIZE
