"""WatchLoadProgress: how far a model is loaded, before the worker is ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from millstream.v1 import worker_pb2, worker_pb2_grpc
from millstream_server.control.engine import LoadProgress, LoadStage, Role
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_server.runtime.lifecycle.main import FAILED
from millstream_server.runtime.telemetry.metrics import MODEL_LOAD
from millstream_server.worker import app
from millstream_server.worker.loading import ModelLoading
from millstream_testing.in_process import ALPHABET, InProcessWorker, plan_of, worker
from millstream_testing.waiting import EOF, until
from tests.support.telemetry.logged import events
from tests.support.wire.failures import refusal
from tests.support.worker.hosted_worker import SOON, host_settings

WEIGHTS = LoadProgress(stage=LoadStage.LOADING_WEIGHTS, files_total=2, bytes_total=90)
STARTING, LOADING, PREPARING, WARMING_UP, READY = range(1, 6)


class SlowEngine(SimulatedEngine):
    """Loads until the test lets it go on, and says how far it is. `LoadObserved`."""

    def __init__(self) -> None:
        super().__init__(ALPHABET)
        self.now = LoadProgress()
        self.goes_on, self.warms_up = asyncio.Event(), asyncio.Event()
        self.fails: EngineFailedError | None = None

    def load_progress(self) -> LoadProgress:
        return self.now

    async def start(self, on_failure: Callable[[ServingError], None]) -> GeneratorInfo:
        await self.goes_on.wait()
        if self.fails:
            raise self.fails
        return await super().start(on_failure)

    async def warm_up(self) -> None:
        await self.warms_up.wait()


def slow_worker(engine: SlowEngine) -> Any:
    return worker(loaded=False, make=lambda _, role: plan_of(engine, role))


@pytest.fixture(autouse=True)
def no_load_before() -> None:
    """The metric is one per process, and a worker that is loading has set none of it."""
    MODEL_LOAD.clear()


def phases() -> dict[str, float]:
    """Return the seconds of `millstream_model_load_seconds`, by phase."""
    (family,) = MODEL_LOAD.collect()
    return {sample.labels["phase"]: sample.value for sample in family.samples}


def watch(w: InProcessWorker) -> Any:
    return w.about.WatchLoadProgress(worker_pb2.WatchLoadProgressRequest())


async def test_it_is_watched_from_the_start_until_the_worker_is_ready() -> None:
    engine = SlowEngine()
    async with slow_worker(engine) as w:
        call = watch(w)
        assert (await call.read()).stage == STARTING
        loading = asyncio.ensure_future(w.host.load(lambda _: None))
        said = []
        for done in (40, 90):
            engine.now = replace(WEIGHTS, files_done=done // 45, bytes_done=done)
            said.append(await call.read())
        assert [(m.stage, m.files_done, m.bytes_done) for m in said] == [
            (LOADING, 0, 40),
            (LOADING, 2, 90),
        ]
        assert all((m.files_total, m.bytes_total) == (2, 90) for m in said)
        engine.now = LoadProgress(stage=LoadStage.PREPARING)
        preparing = await call.read()
        assert (preparing.stage, preparing.bytes_done, preparing.bytes_total) == (PREPARING, 90, 90)
        engine.goes_on.set()
        assert (await call.read()).stage == WARMING_UP
        engine.warms_up.set()
        ready = await call.read()
        assert (ready.stage, ready.files_done, ready.bytes_done) == (READY, 2, 90)
        assert ready.elapsed.ToNanoseconds() >= preparing.elapsed.ToNanoseconds() > 0
        assert await call.read() is EOF
        await loading
        assert list(phases()) == ["starting", "loading_weights", "preparing", "warming_up"]
        assert sum(phases().values()) >= ready.elapsed.ToNanoseconds() / 1e9
        late = watch(w)
        assert await late.read() == ready
        assert await late.read() is EOF


async def test_numbers_never_fall_when_the_engines_do() -> None:
    engine = SlowEngine()
    async with slow_worker(engine) as w:
        engine.now = replace(WEIGHTS, files_done=1, bytes_done=50)
        loading = asyncio.ensure_future(w.host.load(lambda _: None))
        call = watch(w)
        while (message := await call.read()).stage != LOADING:
            pass
        engine.now = replace(WEIGHTS, stage=LoadStage.STARTING, files_done=2, bytes_done=10)
        message = await call.read()
        assert (message.stage, message.files_done, message.bytes_done) == (LOADING, 2, 50)
        call.cancel()
        loading.cancel()
        await asyncio.wait({loading})


async def test_an_engine_that_says_nothing_has_the_hosts_stages() -> None:
    loading = ModelLoading(object())
    stages = [loading.progress.value.stage]
    loading.progress.listen(lambda: stages.append(loading.progress.value.stage))
    async with loading.following():
        pass
    assert phases() == {}
    loading.reach(LoadStage.WARMING_UP)
    assert list(phases()) == ["starting"]
    loading.reach(LoadStage.READY)
    loading.fail()  # too late to matter
    assert list(phases()) == ["starting", "warming_up"]
    assert stages == [STARTING, WARMING_UP, READY]
    assert not loading.failed.value


async def test_watchers_are_told_that_the_model_cannot_be_loaded() -> None:
    engine = SlowEngine()
    engine.fails = EngineFailedError("no such weights")
    settings = host_settings()
    code = asyncio.ensure_future(app.run(settings, plan_of(engine, Role.AGGREGATED)))
    async with grpc.aio.insecure_channel(settings.listen, SOON) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.WatchLoadProgress(worker_pb2.WatchLoadProgressRequest(), wait_for_ready=True)
        assert (await call.read()).stage == STARTING
        engine.goes_on.set()
        told = await refusal(call)
    assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
    assert told.message == "this worker can't load its model; its log says why"
    assert await code == FAILED


async def test_a_long_load_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("millstream_server.worker.loading._POLL_S", 0.01)
    monkeypatch.setattr("millstream_server.worker.loading._LOG_EVERY_POLLS", 1)
    caplog.set_level(logging.INFO)
    engine = SlowEngine()
    engine.now = replace(WEIGHTS, files_done=1, bytes_done=14_200_000_000)
    engine.now = replace(engine.now, bytes_total=60_100_000_000)
    async with ModelLoading(engine).following():
        await until(lambda: bool(events(caplog, "phase")))
    phase = events(caplog, "phase")[0]["phase"]
    assert phase == "loading the model: 1 of 2 files, 14.2 of 60.1 GB, 0 s"
