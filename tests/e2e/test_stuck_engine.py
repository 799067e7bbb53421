"""A real scheduler that stops dead: noticed by the canary's defaults, nothing else stops with it.

On a worker and a Processor of its own: nobody else's requests should hang with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import worker_pb2, worker_pb2_grpc
from millstream_client import NO_RETRY, Client, UnavailableError
from tests.support.processes.suite import ServiceProcess, running
from tests.support.wire.long_streams import NOT_SERVING, SERVING, watched_health

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

WORKER = "millstream.v1.DecodeService"
PROCESSOR = "millstream.v1.ProcessorService"
NOTICED_WITHIN_S = 15.0
RECOVERED_WITHIN_S = 5.0
LONGEST_SILENCE_S = 2.0  # of a worker's own event loop, on a machine that others share


@dataclass
class Pulse:
    """How long the worker kept an RPC waiting at most, while its engine was stuck."""

    checks: int = 0
    longest_s: float = 0.0
    liveness: set[int] = field(default_factory=set)
    reports: int = 0

    async def _check(self, stub: Any) -> None:
        while True:
            asked = time.monotonic()
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10)
            self.longest_s = max(self.longest_s, time.monotonic() - asked)
            self.checks += 1
            self.liveness.add(answer.status)
            await asyncio.sleep(0.05)

    async def _ask_load(self, stub: Any) -> None:
        # Anew each time: an open watch says nothing while the load stays the same.
        interval = Duration()
        interval.FromMilliseconds(100)
        while True:
            call = stub.WatchLoad(worker_pb2.WatchLoadRequest(interval=interval))
            asked = time.monotonic()
            await call.read()
            self.longest_s = max(self.longest_s, time.monotonic() - asked)
            self.reports += 1
            call.cancel()
            await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def felt(self, channel: grpc.aio.Channel) -> AsyncIterator[None]:
        tasks = [
            asyncio.ensure_future(self._check(health_pb2_grpc.HealthStub(channel))),
            asyncio.ensure_future(self._ask_load(worker_pb2_grpc.WorkerServiceStub(channel))),
        ]
        try:
            yield
            assert not any(task.done() for task in tasks), "the worker refused to answer"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@pytest.fixture
def services(model: Path, tmp_path: Path) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    worker = ServiceProcess(
        "millstream_server.decode",
        {"model_path": model, "model_name": "tiny", "max_total_tokens": 4096},
        tmp_path / "worker.log",
        interpreter=True,  # the one of all tests that starts as a user starts it
    )
    front = ServiceProcess(
        "millstream_server.processor",
        {"models": f"tiny={model}", "workers": worker.address},
        tmp_path / "front.log",
    )
    with running(worker, front):
        yield worker, front


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP; SIGCONT at the end, whatever happens."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _scheduler(worker: ServiceProcess) -> psutil.Process:
    children = psutil.Process(worker.pid).children(recursive=True)
    (found,) = (child for child in children if "scheduler" in " ".join(child.cmdline()))
    return found


async def test_a_stopped_scheduler(services: tuple[ServiceProcess, ServiceProcess]) -> None:
    worker, front = services
    pulse = Pulse()
    async with (
        grpc.aio.insecure_channel(worker.address) as channel,
        grpc.aio.insecure_channel(front.address) as front_channel,
        watched_health(channel, WORKER, "", "liveness") as (health, whole, liveness),
        watched_health(front_channel, PROCESSOR) as (front_health,),
        Client(front.address, retry=NO_RETRY) as client,
    ):
        assert (await client.chat("hi", max_new_tokens=4).answer()).complete
        with stopped(_scheduler(worker).pid):
            began = time.monotonic()
            async with pulse.felt(channel):
                await health.until(NOT_SERVING, NOTICED_WITHIN_S)
                noticed_s = time.monotonic() - began
                await whole.until(NOT_SERVING, 1)
                await front_health.until(NOT_SERVING, 2)
                asked = time.monotonic()
                with pytest.raises(UnavailableError) as refused:
                    await client.chat("hi", max_new_tokens=4, timeout_s=10).answer()
                assert refused.value.reason == "NO_WORKER"
                assert refused.value.retryable
                assert time.monotonic() - asked < LONGEST_SILENCE_S
        resumed = time.monotonic()
        await health.until(SERVING, RECOVERED_WITHIN_S)
        recovered_s = time.monotonic() - resumed
        await front_health.until(SERVING, 2)
        assert (await client.chat("hi", max_new_tokens=4).answer()).complete
        assert health.told == [SERVING, NOT_SERVING, SERVING]
        assert liveness.told == [SERVING]
    assert pulse.liveness == {SERVING}
    assert pulse.checks > 20
    assert pulse.reports > 20
    assert pulse.longest_s < LONGEST_SILENCE_S
    print(f"noticed after {noticed_s:.1f} s, recovered after {recovered_s:.1f} s, {pulse}")  # noqa: T201
