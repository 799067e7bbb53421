"""A canary that fails ends its worker.

The worker is a whole one, as `worker.app` wires it, in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from millstream_server.control.engine import Role
from millstream_server.decode.app import DecodeSettings
from millstream_server.engines.registry import GENERATORS
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.worker import app
from millstream_server.generation.worker.servicer import DECODE as SERVED
from millstream_server.runtime.lifecycle.main import FAILED
from millstream_server.runtime.telemetry.metrics import DRAINING
from millstream_server.worker.canary import Canary
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.telemetry.logged import events
from tests.support.wire.long_streams import SERVING, watched_health

DECODE = "millstream.v1.DecodeService"
STOPS = {"reason": "its canary failed, so a hang would not be detected"}


class Engine(SimulatedEngine):
    """One whose progress can't be read, from a moment on."""

    broken = False
    looks = 0

    def progress(self, dp_rank: int) -> int:
        self.looks += 1
        if self.broken:
            raise ZeroDivisionError("an accident")
        return super().progress(dp_rank)


@contextlib.asynccontextmanager
async def worker(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Engine, asyncio.Task[int]]]:
    """Run a worker's whole app; answers its engine and its exit code to come."""
    engine = Engine(SimulatedConfig())
    monkeypatch.setattr(GENERATORS, "make", lambda *_, **__: engine)
    settings = DecodeSettings(
        listen=f"127.0.0.1:{free_port()}",
        metrics_listen="",
        engine="simulated",
        model_name="tiny",
        canary_interval_s=0.1,
        canary_timeout_s=0.3,
    )
    code = asyncio.ensure_future(app.run(settings, Role.AGGREGATED, SERVED))
    try:
        async with (
            grpc.aio.insecure_channel(settings.listen) as channel,
            watched_health(channel, DECODE) as (health,),
        ):
            await health.until(SERVING)
            yield engine, code
    finally:
        code.cancel()
        await asyncio.wait({code})
        DRAINING.set(0)  # the gauge is this whole process's


async def test_a_canary_that_raises_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker(monkeypatch) as (engine, code):
        looks = engine.looks
        await until(lambda: engine.looks > looks)
        assert not code.done()
        engine.broken = True
        assert await asyncio.wait_for(code, 10) == FAILED
    assert events(caplog, "worker stops after a failure") == [STOPS]
    assert "ZeroDivisionError: an accident" in caplog.text, "the log says why"


async def test_a_canary_that_just_ends_does_so_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = asyncio.Event()

    async def run(_: Canary) -> None:
        await ends.wait()

    monkeypatch.setattr(Canary, "run", run)
    async with worker(monkeypatch) as (_, code):
        assert not code.done()
        ends.set()
        assert await asyncio.wait_for(code, 10) == FAILED
    assert events(caplog, "worker stops after a failure") == [STOPS]


async def test_a_canary_that_ends_with_its_worker_is_no_accident(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker(monkeypatch) as (engine, code):
        looks = engine.looks
        await until(lambda: engine.looks > looks)
        code.cancel()
        await asyncio.wait({code})
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []
