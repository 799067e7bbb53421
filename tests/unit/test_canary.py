"""The canary: a hanging engine is detected in time, a busy one gets no alarm."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millstream_server.control.engine import Probeable, Role
from millstream_server.decode.app import DecodeSettings
from millstream_server.engines.sglang.loads import RankProgress
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.output import CollectingSink
from millstream_server.generation.request import GenerationRequest, Prompt, new_engine_id
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.ticket import Ticket
from millstream_server.generation.worker import app
from millstream_server.generation.worker.servicer import DECODE
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_server.runtime.lifecycle.conditions import HealthConditions
from millstream_server.worker import canary as canary_module
from millstream_server.worker.canary import Canary, CanaryTimes, EngineWatch, ExpectedSilence
from millstream_testing.waiting import until

TIMES = CanaryTimes(interval_s=0.1, deadline_s=0.3, retry_s=0.05)
LIMIT_S = TIMES.interval_s + TIMES.deadline_s
SLACK_S = 1.0  # of a machine that others share
CONFIG = SimulatedConfig(step_s=0.001)
HANDOFF = Ticket("127.0.0.1", 1, 5)


class Watched:
    """A canary at work and what it told."""

    def __init__(self, engine: Probeable, dp_size: int = 1, times: CanaryTimes = TIMES) -> None:
        self.told: list[bool] = []
        self.silence = ExpectedSilence()
        self.canary = Canary(engine, dp_size, self.told.append, times, self.silence)


@contextlib.asynccontextmanager
async def watched(
    engine: Probeable, dp_size: int = 1, times: CanaryTimes = TIMES
) -> AsyncIterator[Watched]:
    watched = Watched(engine, dp_size, times)
    task = asyncio.create_task(watched.canary.run())
    try:
        yield watched
        assert not task.done(), "it watches for ever"
    finally:
        task.cancel()
        await asyncio.wait({task})


@contextlib.asynccontextmanager
async def simulated(config: SimulatedConfig = CONFIG) -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(config)
    await engine.start(lambda _: None)
    await engine.warm_up()
    try:
        yield engine
    finally:
        await engine.close()


def submit(
    engine: SimulatedEngine, max_new_tokens: int, handoff: Ticket | None = None
) -> CollectingSink:
    sink = CollectingSink()
    engine.submit(
        GenerationRequest(
            engine_id=new_engine_id(),
            prompt=Prompt((1,)),
            sampling=Sampling(max_new_tokens=max_new_tokens),
            ticket=handoff,
        ),
        sink,
    )
    return sink


@pytest.mark.parametrize("role", Role)
async def test_a_hang_is_noticed_in_time_and_so_is_its_end(role: Role) -> None:
    async with simulated(replace(CONFIG, role=role)) as engine, watched(engine) as w:
        await until(lambda: w.canary.probes >= 2)
        assert w.canary.last_duration_s is not None
        assert w.canary.last_duration_s < TIMES.deadline_s
        assert (w.told, w.canary.failures, w.canary.healthy) == ([], 0, True)
        engine.wedge()
        began = time.monotonic()
        await until(lambda: w.told == [False])
        assert time.monotonic() - began < LIMIT_S + SLACK_S
        assert (w.canary.failures, w.canary.healthy) == (1, False)
        await until(lambda: w.canary.failures >= 3)
        assert w.told == [False], "told once"
        engine.unwedge()
        began = time.monotonic()
        await until(lambda: w.told == [False, True])
        assert time.monotonic() - began < TIMES.retry_s + SLACK_S
        assert w.canary.healthy


async def test_failed_canaries_leave_nothing_in_the_engine() -> None:
    async with simulated() as engine, watched(engine) as w:
        engine.wedge()
        await until(lambda: w.canary.failures >= 3)
        load = await engine.load()
        assert load.running_requests + load.queued_requests <= 1  # the one that is being tried
        engine.unwedge()
        await until(lambda: w.told == [False, True])
    load = await engine.load()
    assert (load.running_requests, load.queued_requests, load.used_blocks) == (0, 0, 0)


async def test_a_hang_with_requests_open_is_noticed_and_they_go_on_after_it() -> None:
    async with simulated() as engine, watched(engine) as w:
        sink = submit(engine, 1000)
        await sink.first_token()
        engine.wedge()
        await until(lambda: w.told == [False])
        engine.unwedge()
        await until(lambda: w.told == [False, True])
        assert (await sink.result()).completion_tokens == 1000


async def test_no_canary_runs_while_real_work_gets_on() -> None:
    async with simulated() as engine:
        sink = submit(engine, 1 << 20)
        await sink.first_token()
        async with watched(engine) as w:
            had = len(sink.token_ids)
            await until(lambda: len(sink.token_ids) > had + 500)
            assert w.canary.probes == 0
            assert w.told == []


async def test_a_canary_that_queues_behind_a_batch_that_gets_on_is_no_alarm() -> None:
    # A step each 0.2 s, one request at once: longer apart than the interval, so a canary goes in,
    # and waits behind 10 steps, 2 s, which is far beyond its deadline.
    times = replace(TIMES, interval_s=0.05, deadline_s=0.6)
    async with simulated(SimulatedConfig(max_running_requests=1, step_s=0.2)) as engine:
        sink = submit(engine, 10)
        async with watched(engine, times=times) as w:
            await until(lambda: w.canary.probes == 1)
            await sink.result()
            await until(lambda: w.canary.last_duration_s is not None)
            assert w.canary.last_duration_s is not None
            assert w.canary.last_duration_s > times.deadline_s
            assert (w.told, w.canary.failures) == ([], 0)


async def test_a_prefill_without_a_partner_waits_but_is_no_hang() -> None:
    config = SimulatedConfig(role=Role.PREFILL, handoff_wait_s=60)
    async with simulated(config) as engine, watched(engine) as w:
        submit(engine, 1, HANDOFF)
        await until(lambda: w.canary.probes >= 3)
        assert w.told == []


class ScriptedEngine:
    """Two ranks; the second fails or hangs, deaf to cancellation, as told."""

    def __init__(self) -> None:
        self.done = [0, 0]
        self.way = "works"

    def progress(self, dp_rank: int) -> int:
        return self.done[dp_rank]

    async def probe(self, dp_rank: int) -> None:
        if dp_rank == 1 and self.way == "fails":
            raise EngineFailedError("no")
        while dp_rank == 1 and self.way == "is deaf":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        self.done[dp_rank] += 1


@pytest.mark.parametrize("way", ["fails", "is deaf"])
async def test_one_rank_of_two(way: str) -> None:
    engine = ScriptedEngine()
    async with watched(engine, dp_size=2) as w:
        await until(lambda: min(engine.done) > 1)
        assert w.told == []
        engine.way = way
        await until(lambda: w.told == [False])
        others = engine.done[0]
        await until(lambda: engine.done[0] > others + 1)  # the other one is watched on
        assert w.told == [False]
        engine.way = "works"
        await until(lambda: w.told == [False, True])


async def test_after_a_failure_it_tries_more_often() -> None:
    engine = ScriptedEngine()
    times = replace(TIMES, interval_s=0.8, retry_s=0.02)
    async with watched(engine, dp_size=2, times=times) as w:
        engine.way = "fails"
        await until(lambda: w.canary.failures == 1)
        began = time.monotonic()
        await until(lambda: w.canary.failures >= 6)
        assert time.monotonic() - began < 5 * times.interval_s / 2


async def test_real_work_ends_the_alarm_without_a_canary() -> None:
    engine = ScriptedEngine()
    async with watched(engine, dp_size=2, times=replace(TIMES, retry_s=60)) as w:
        engine.way = "fails"
        await until(lambda: w.told == [False])
        probes = w.canary.failures
        engine.done[1] += 1
        await until(lambda: w.told == [False, True])
        assert w.canary.failures == probes


@pytest.mark.parametrize("kind", [WorkerSettings, DecodeSettings])
async def test_a_worker_by_default_notices_a_hang_within_fifteen_seconds(
    kind: type[WorkerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the times that a worker's app gives its canary, not of the canary's own."""
    made: list[CanaryTimes] = []

    def remember(*args: Any) -> Canary:
        canary = Canary(*args)
        made.append(canary._times)
        return canary

    monkeypatch.setattr(canary_module, "Canary", remember)
    settings = kind(listen="127.0.0.1:0", metrics_listen="", engine="simulated")
    running = asyncio.ensure_future(app.run(settings, Role.AGGREGATED, DECODE))
    try:
        await until(lambda: bool(made) or running.done())
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait({running})
    (times,) = made
    assert times.interval_s + times.deadline_s + 2 * times.poll_s < 15


def test_progress_counts_outputs_by_rank() -> None:
    progress = RankProgress()
    progress.note({"output_ids": [5], "meta_info": {"dp_rank": 1}})
    progress.note({"output_ids": [], "meta_info": {"dp_rank": 0}})
    progress.note({"output_ids": [5], "meta_info": {}})
    progress.note({"output_ids": [5], "meta_info": {"dp_rank": None}})
    assert [progress.of(rank) for rank in range(3)] == [2, 1, 0]


class SnapshotFile:
    """Like SGLang's reader: `read` takes the file's lock, and waits for it."""

    def __init__(self, descriptor: int) -> None:
        self.fd = descriptor
        self.tokens = 0

    def read(self, dp_rank: int) -> SimpleNamespace:
        fcntl.flock(self.fd, fcntl.LOCK_SH)
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return SimpleNamespace(total_prefill_uncached_tokens=self.tokens)


def test_prefilled_chunks_are_progress_and_a_writer_that_hangs_holds_nobody(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    path.touch()
    progress = RankProgress()
    with path.open("rb") as file:
        snapshots = SnapshotFile(file.fileno())
        progress.read_loads_from(snapshots)
        snapshots.tokens = 64
        assert progress.of(0) == 64
        with path.open("rb") as writer:
            fcntl.flock(writer, fcntl.LOCK_EX)
            snapshots.tokens = 128
            assert progress.of(0) == 64  # would wait for ever
        assert progress.of(0) == 128


# ---- an operator has paused it, or changes it


async def test_an_engine_that_is_to_rest_is_not_called_stuck_and_watched_afterwards() -> None:
    looks = iter(range(1_000_000))
    async with simulated() as engine, watched(engine) as seen:
        seen.silence.expected = lambda: bool(next(looks) + 1)
        engine.wedge()
        many = round(2 * LIMIT_S / TIMES.poll_s)
        await until(lambda: next(looks) > 2 * many)
        assert (seen.told, seen.canary.probes) == ([], 0)
        seen.silence.expected = lambda: False
        await until(lambda: seen.told == [False])
        engine.unwedge()
        await until(lambda: seen.told == [False, True])


async def test_an_engine_that_is_to_rest_is_not_given_up() -> None:
    given_up: list[ServingError] = []
    looks = iter(range(1_000_000))
    silence = ExpectedSilence()
    silence.expected = lambda: bool(next(looks) + 1)
    conditions = HealthConditions(lambda _: None)
    watch = EngineWatch(conditions, 0.001, given_up.append, silence)
    watch._changed(healthy=False)
    await until(lambda: next(looks) > 5)
    assert (given_up, conditions.holding) == ([], ("stuck",))
    silence.expected = lambda: False
    await until(lambda: len(given_up) == 1)


async def test_a_pause_during_a_probe_is_no_failure() -> None:
    async with simulated() as engine, watched(engine) as seen:
        engine.wedge()
        await until(lambda: seen.canary.probes == 1)
        seen.silence.expected = lambda: True
        await until(lambda: not seen.silence.probes.count)
        engine.unwedge()
        seen.silence.expected = lambda: False
        await until(lambda: seen.canary.probes >= 2)
        assert (seen.told, seen.canary.failures) == ([], 0)


async def test_an_engine_is_changed_when_no_probe_is_in_it() -> None:
    async with simulated() as engine, watched(engine) as seen:
        engine.wedge()
        await until(lambda: seen.canary.probes == 1)
        waiting = asyncio.ensure_future(seen.silence.until_no_probe())
        await asyncio.sleep(0)
        assert not waiting.done()
        engine.unwedge()
        await waiting
        assert seen.canary.failures == 0
        with seen.silence.without_new_probes():
            assert not seen.silence.probes_wanted
