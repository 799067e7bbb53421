"""What a link finds out about a worker, and when the worker gets requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream.v1 import worker_pb2
from millstream_server.control.engine import Role, WorkerDescription
from millstream_server.links import link as link_module
from millstream_server.links.channel import CallError
from millstream_server.links.grpc_channel import GrpcChannel
from millstream_server.links.link import WorkerCondition, WorkerLink, WorkerStatus
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import Code, WorkerLostError
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.processor.played_channel import PlayedChannel
from tests.support.processor.played_worker import (
    NOT_SERVING,
    SERVING,
    Health,
    PlayedWorker,
    Sink,
    finish,
    linked,
    serving,
    start,
)
from tests.support.processor.views import description


async def test_a_load_that_is_no_longer_reported_is_forgotten_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "_RETRY_S", 0.1)
    async with linked() as (worker, link):
        await until(lambda: link.view.load is not None)
        assert link.view.load is not None
        assert link.view.load.running_requests == 99
        worker.stop_watching.set()
        await until(lambda: link.view.load is None)
        worker.stop_watching.clear()
        await until(lambda: link.view.load is not None)
        assert link.view.description is not None
        assert worker.connections == 1


# ---- health


async def test_a_worker_gets_requests_only_while_it_says_that_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "_RETRY_S", 0.01)
    health = Health()
    async with linked(health=health) as (worker, link):
        await until(lambda: bool(worker.connections and health.watches))
        assert link.view.description is None, "before it has said anything"
        health.says.put_nowait(NOT_SERVING)
        await until(health.says.empty)
        assert link.view.description is None
        health.says.put_nowait(SERVING)
        await until(lambda: link.view.description is not None)
        health.says.put_nowait(NOT_SERVING)
        await until(lambda: link.view.description is None)
        health.says.put_nowait(None)
        await until(lambda: health.watches == 2)
        assert link.view.description is None
        health.says.put_nowait(SERVING)
        await until(lambda: link.view.description is not None)
        health.says.put_nowait(None)
        await until(lambda: health.watches == 3)
        assert link.view.description is not None, "what it said last holds"
        assert worker.connections == 1


class RareReports(PlayedWorker):
    """Reports its load when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.speaks = asyncio.Event()

    async def WatchLoad(
        self, request: Any, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        while not self.stop_watching.is_set():
            yield worker_pb2.WatchLoadResponse(load=worker_pb2.LoadReport())
            await self.speaks.wait()
            self.speaks.clear()


async def test_a_worker_that_falls_silent_gets_nothing_until_it_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pings are answered by gRPC's threads, even while its event loop hangs."""
    monkeypatch.setattr(link_module, "_SILENCE_S", 0.2)
    reporting = RareReports()
    async with linked(reporting) as (worker, link):
        running = Sink()
        start(link, running)
        await until(lambda: link.view.description is None)
        assert link.view.in_flight == 1
        reporting.speaks.set()
        await until(lambda: link.view.description is not None)
        await until(lambda: link.view.description is None)
        reporting.stop_watching.set()
        reporting.speaks.set()
        await until(lambda: link.view.description is not None)
        worker.send(finishes=[finish(0)])
        await until(lambda: bool(running.ends))
        assert worker.connections == 1


# ---- leaving


async def test_a_retired_worker_ends_what_it_runs_and_is_left() -> None:
    async with serving(PlayedWorker()) as address:
        link = WorkerLink(address, GrpcChannel, lambda: None)
        living = asyncio.ensure_future(link.run())
        await until(lambda: link.view.description is not None)
        running = Sink()
        start(link, running)
        link.retire()
        assert link.view.description is None
        assert not living.done()
    await asyncio.wait_for(living, 5)
    assert isinstance(running.ends[0], WorkerLostError), "the worker went away meanwhile"


async def test_a_worker_that_is_retired_while_it_is_away_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(link_module, "_INFO_TIMEOUT_S", 0.1)
    link = WorkerLink(f"127.0.0.1:{free_port()}", GrpcChannel, lambda: None)
    living = asyncio.ensure_future(link.run())
    await asyncio.sleep(0)
    link.retire()
    await asyncio.wait_for(living, 5)
    assert link.status.conditions == {WorkerCondition.NOT_CONNECTED, WorkerCondition.RETIRED}


# ---- what a worker is


def test_a_worker_that_changes_is_described_anew_but_for_its_role() -> None:
    changes: list[WorkerDescription | None] = []
    view = WorkerView("a:1")
    status = WorkerStatus(view, lambda: changes.append(view.description))
    before, after = description(), description(context_length=5)
    status.connected(before)
    status.describe(after)
    assert changes == [], "it doesn't take requests yet"
    status.clear(WorkerCondition.NOT_SERVING)
    status.describe(before)
    status.describe(before)
    assert changes == [after, before]
    with pytest.raises(ValueError, match="was aggregated and is now prefill"):
        status.describe(description(Role.PREFILL))


def test_a_worker_takes_requests_only_while_no_condition_holds() -> None:
    view = WorkerView("a:1")
    status = WorkerStatus(view, lambda: None)
    status.connected(description())
    status.set(WorkerCondition.SILENT)
    status.clear(WorkerCondition.NOT_SERVING)
    assert view.description is None
    assert view.last_description is None
    status.clear(WorkerCondition.SILENT)
    assert view.description == view.last_description is not None
    status.disconnected(expected=False)
    assert view.description is None
    assert view.last_description is not None


class Changing(PlayedWorker):
    """Tells of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.infos: asyncio.Queue[worker_pb2.WorkerInfo] = asyncio.Queue()

    async def WatchWorkerInfo(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            info = await self.infos.get()
            yield worker_pb2.WatchWorkerInfoResponse(info=info)


async def test_changes_of_what_a_worker_is_are_followed() -> None:
    changing = Changing()
    async with linked(changing) as (worker, link):
        running = Sink()
        start(link, running)
        changing.infos.put_nowait(
            worker_pb2.WorkerInfo(
                role=changing.role, model="m", vocab_size=9, context_length=5, weight_version="2"
            )
        )
        await until(
            lambda: bool(
                link.view.description and link.view.description.engine.weight_version == "2"
            )
        )
        changing.infos.put_nowait(
            worker_pb2.WorkerInfo(role=worker_pb2.WORKER_ROLE_DECODE, model="m", vocab_size=9)
        )
        await until(lambda: bool(running.ends))
        assert isinstance(running.ends[0], WorkerLostError), "another role is another worker"
        await until(lambda: worker.connections == 2)


# ---- accidents


@pytest.mark.parametrize("turns", range(6))
async def test_a_link_that_breaks_while_it_is_closed_ends(turns: int) -> None:
    """Whatever comes first: up to Python 3.12 a TaskGroup can lose the cancel."""
    info = worker_pb2.WorkerInfo(role=worker_pb2.WORKER_ROLE_AGGREGATED, model="m", vocab_size=9)
    channel = PlayedChannel(GetWorkerInfo=worker_pb2.GetWorkerInfoResponse(info=info))
    channel.streams["Health/Watch"].comes.put_nowait(CallError(Code.UNIMPLEMENTED))
    link = WorkerLink("a:1", lambda _: channel, lambda: None)
    living = asyncio.ensure_future(link.run())
    await until(lambda: link.view.description is not None)
    channel.streams["DecodeService/Decode"].comes.put_nowait(CallError(Code.UNAVAILABLE))
    for _ in range(turns):
        await asyncio.sleep(0)
    link.close()
    living.cancel()
    await asyncio.wait([living], timeout=5)
    assert living.done()
