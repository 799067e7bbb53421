"""WorkerService: what a worker is, and how its load is pushed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import worker_pb2
from millstream_server.control.engine import EngineLoad, RankLoad, Role, WorkerDescription
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.worker.host import WorkerPlan
from millstream_server.worker_info import description_to_proto
from millstream_testing.in_process import (
    ALPHABET,
    CONTEXT_LENGTH,
    MODEL,
    VOCAB_SIZE,
    plan_of,
    worker,
)
from millstream_testing.waiting import until
from tests.support.wire.failures import refusal
from tests.support.worker.worker_streams import decode_stream

ASK = worker_pb2.GetWorkerInfoRequest()


def _every(milliseconds: int) -> worker_pb2.WatchLoadRequest:
    interval = Duration()
    interval.FromMilliseconds(milliseconds)
    return worker_pb2.WatchLoadRequest(interval=interval)


async def test_info_once_the_model_is_loaded() -> None:
    async with worker(loaded=False) as w:
        for call in (w.about.GetWorkerInfo(ASK), w.about.WatchLoad(_every(100))):
            early = await refusal(call)
            assert early.code is grpc.StatusCode.UNAVAILABLE
            assert early.reason == "UNAVAILABLE"
            assert early.retryable
            assert early.retry_delay_s == 1
        await w.load()
        info = (await w.about.GetWorkerInfo(ASK)).info
        again = (await w.about.GetWorkerInfo(ASK)).info
    assert info == again
    assert len(info.worker_id) == 16
    assert info.role == worker_pb2.WORKER_ROLE_AGGREGATED
    assert info.model == MODEL
    assert (info.engine, info.engine_version) == ("simulated", "1")
    assert (info.vocab_size, info.context_length) == (VOCAB_SIZE, CONTEXT_LENGTH)
    assert (info.block_size, info.total_blocks) == (16, 1 << 20)
    assert (info.max_running_requests, info.dp_size) == (4096, 1)
    assert worker_pb2.ENGINE_ABILITY_SEED in info.abilities
    assert worker_pb2.ENGINE_ABILITY_CONSTRAINTS not in info.abilities
    assert info.bootstrap_port == 0
    assert info.millstream_version


async def test_a_watch_tells_of_the_model_once_loaded_and_of_each_change() -> None:
    async with worker(loaded=False) as w:
        watch = w.about.WatchWorkerInfo(worker_pb2.WatchWorkerInfoRequest())
        first = asyncio.ensure_future(watch.read())
        await until(lambda: bool(w.host.description._listeners))
        assert not first.done()
        loaded = await w.load()
        info = (await first).info
        assert info == (await w.about.GetWorkerInfo(ASK)).info
        w.host.set_info(replace(loaded, weight_version="2", abilities=frozenset()))
        changed = (await watch.read()).info
        assert (changed.weight_version, list(changed.abilities)) == ("2", [])
        assert (changed.worker_id, changed.vocab_size) == (info.worker_id, info.vocab_size)
        assert changed == (await w.about.GetWorkerInfo(ASK)).info
        again = w.about.WatchWorkerInfo(worker_pb2.WatchWorkerInfoRequest())
        assert (await again.read()).info == changed
        again.cancel()
        w.host.set_info(replace(loaded, weight_version="3"))
        assert (await watch.read()).info.weight_version == "3"
        watch.cancel()
        await until(lambda: not w.host.description._listeners)


async def test_a_watch_ends_when_the_worker_drains() -> None:
    async with worker() as w:
        watch = w.about.WatchWorkerInfo(worker_pb2.WatchWorkerInfoRequest())
        await watch.read()
        draining = asyncio.ensure_future(w.host.drain(0, 5))
        for call in (watch, w.about.WatchWorkerInfo(worker_pb2.WatchWorkerInfoRequest())):
            told = await refusal(call)
            assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_DRAINING")
            assert told.retryable
        assert await draining


async def test_a_restarted_worker_has_another_id() -> None:
    ids = set()
    for _ in range(2):
        async with worker() as w:
            ids.add((await w.about.GetWorkerInfo(ASK)).info.worker_id)
    assert len(ids) == 2


async def test_a_prefill_worker_tells_where_it_hands_over() -> None:
    async with worker(replace(ALPHABET, role=Role.PREFILL)) as w:
        info = (await w.about.GetWorkerInfo(ASK)).info
        assert info.role == worker_pb2.WORKER_ROLE_PREFILL
        assert info.bootstrap_host == "127.0.0.1"
        _, writer = await asyncio.open_connection(info.bootstrap_host, info.bootstrap_port)
        writer.close()
        await writer.wait_closed()


async def test_health_follows_the_model_and_liveness_the_process() -> None:
    async with worker(loaded=False) as w:
        health = health_pb2_grpc.HealthStub(w.channel)
        names = ("", "millstream.v1.DecodeService", "millstream.v1.WorkerService", "liveness")

        async def states() -> list[int]:
            return [
                (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
                for name in names
            ]

        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        assert await states() == [not_serving] * 3 + [serving]
        await w.load()
        assert await states() == [serving] * 4


async def test_the_load_comes_at_once_and_as_it_changes() -> None:
    async with worker(replace(ALPHABET, step_s=0.005, max_running_requests=2)) as w:
        watch = w.about.WatchLoad(_every(100))
        first = (await watch.read()).load
        assert (first.running_requests, first.queued_requests, first.used_blocks) == (0, 0, 0)
        assert first.total_blocks == 1 << 20
        stream = decode_stream(w.decode)
        for slot in range(3):
            await stream.start(slot, [1] * 16, max_new_tokens=400)
        busy = (await watch.read()).load
        assert (busy.running_requests, busy.queued_requests) == (2, 1)
        assert (
            busy.used_blocks == 2 * 26 - 1
        )  # 416 tokens in blocks of 16; the first block is of both
        for slot in range(3):
            await stream.cancel(slot)
        await stream.ended(0, 1, 2)
        idle = (await watch.read()).load
        while idle.running_requests or idle.queued_requests:
            idle = (await watch.read()).load
        assert without_times(idle).ranks == without_times(first).ranks
        assert (idle.used_blocks, idle.total_blocks) == (0, 1 << 20)
        watch.cancel()


async def test_an_unchanged_load_is_repeated_after_ten_intervals() -> None:
    async with worker() as w:
        watch = w.about.WatchLoad(_every(100))
        first = (await watch.read()).load
        began = time.monotonic()
        assert without_times((await watch.read()).load) == without_times(first)
        assert 0.9 < time.monotonic() - began < 3
        watch.cancel()


async def test_a_report_has_each_rank_and_the_tokens_of_ended_requests() -> None:
    async with worker(make=_of_ranks) as w:
        stream = decode_stream(w.decode)
        await stream.start(0, [1] * 20, max_new_tokens=5)
        await stream.start(1, [1] * 30, max_new_tokens=7)
        await stream.ended(0, 1)
        load = (await w.about.WatchLoad(_every(100)).read()).load
        totals = (load.prompt_tokens_total, load.completion_tokens_total)
        assert totals == (50, 12)
        assert load.cached_tokens_total <= 50
        busy, idle = load.ranks
        assert (busy.dp_rank, idle.dp_rank) == (2, 3)
        assert (busy.running_requests, busy.queued_requests, busy.queued_tokens) == (1, 2, 30)
        assert (busy.used_blocks, busy.total_blocks) == (4, 10)
        assert (idle.running_requests, idle.used_blocks, idle.total_blocks) == (0, 0, 10)
        assert busy.HasField("since_progress")
        assert idle.HasField("since_progress")


def _of_ranks(_: SimulatedEngine, role: Role) -> WorkerPlan[GeneratorInfo]:
    """Plan a worker of the ranks 2 and 3, whose load doesn't change."""
    busy = RankLoad(
        running_requests=1, queued_requests=2, queued_tokens=30, used_blocks=4, total_blocks=10
    )
    idle = RankLoad(running_requests=0, queued_requests=0, used_blocks=0, total_blocks=10)
    load = EngineLoad(
        running_requests=1, queued_requests=2, used_blocks=4, total_blocks=20, ranks=(busy, idle)
    )

    class OfRanks(SimulatedEngine):
        async def load(self) -> EngineLoad:
            return load

        def progress(self, dp_rank: int) -> int:
            return dp_rank

    def describe(description: WorkerDescription) -> worker_pb2.WorkerInfo:
        info = description_to_proto(description)
        info.dp_start, info.dp_size = 2, 2
        return info

    return replace(plan_of(OfRanks(replace(ALPHABET, role=role)), role), describe=describe)


def without_times(load: worker_pb2.LoadReport) -> worker_pb2.LoadReport:
    """Return a report that says the same whenever it is made."""
    timeless = worker_pb2.LoadReport()
    timeless.CopyFrom(load)
    for rank in timeless.ranks:
        rank.ClearField("since_progress")
    return timeless


async def test_reports_keep_their_distance() -> None:
    async with worker(replace(ALPHABET, step_s=0.001)) as w:
        stream = decode_stream(w.decode)
        watch = w.about.WatchLoad(_every(200))
        await watch.read()
        began = time.monotonic()
        await stream.start(0, [1], max_new_tokens=400)
        await watch.read()
        await watch.read()  # busy, then idle again
        assert time.monotonic() - began > 0.3
        watch.cancel()


@pytest.mark.parametrize("milliseconds", [0, 99, 60_001, -1000])
async def test_an_interval_out_of_bounds_is_refused(milliseconds: int) -> None:
    async with worker() as w:
        failed = await refusal(w.about.WatchLoad(_every(milliseconds)))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (failed.reason, failed.fields) == ("INVALID_REQUEST", ("interval",))
        assert not failed.retryable
        assert failed.retry_delay_s is None


@pytest.mark.parametrize("milliseconds", [100, 60_000])
async def test_the_bounds_themselves_are_allowed(milliseconds: int) -> None:
    async with worker() as w:
        watch = w.about.WatchLoad(_every(milliseconds))
        assert (await watch.read()).load.total_blocks == 1 << 20
        watch.cancel()
