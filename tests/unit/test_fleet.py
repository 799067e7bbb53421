"""Links follow what discovery names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from millstream_server.control.engine import Role
from millstream_server.diffusion.request import DiffusionRequest, Kind
from millstream_server.embedding.request import RerankRequest
from millstream_server.generation.output import Finish
from millstream_server.links import link
from millstream_server.links.fleet import Fleet
from millstream_server.routing.discovery import sources
from millstream_server.routing.discovery.sources import Addresses, Discovery, StaticDiscovery
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.router import Router
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import NoWorkerError, WorkerLostError
from millstream_testing.waiting import until
from tests.support.processor.played_worker import (
    NOT_SERVING,
    REQUEST,
    SERVING,
    Health,
    PlayedWorker,
    Sink,
    finish,
    serving,
)

ROUTED = RoutingRequest(model="m")


class ToldDiscovery:
    """Finds what the test names."""

    def __init__(self, *addresses: str) -> None:
        self._found: asyncio.Queue[Addresses] = asyncio.Queue()
        self.name(*addresses)

    def name(self, *addresses: str) -> None:
        self._found.put_nowait(frozenset(addresses))

    async def watch(self) -> AsyncIterator[Addresses]:
        while True:
            yield await self._found.get()


@contextlib.asynccontextmanager
async def fleet_of(
    discovery: Discovery, round_s: float = 0.0
) -> AsyncIterator[tuple[Fleet, Router]]:
    router = Router(lambda: make_policy(PolicyName.LEAST_LOADED), round_s=round_s)
    fleet = Fleet(discovery, router)
    fleet.open()
    try:
        yield fleet, router
    finally:
        await fleet.close()
        with pytest.raises(NoWorkerError):
            router.require("m")


async def test_a_worker_that_is_no_longer_named_ends_what_it_runs_and_gets_nothing_new() -> None:
    old, new = PlayedWorker(), PlayedWorker()
    async with serving(old) as first, serving(new) as second:
        discovery = ToldDiscovery(first)
        async with fleet_of(discovery) as (fleet, router):
            await until(lambda: router.ready("m"))
            running = Sink()
            fleet.generate(first, REQUEST, running)
            discovery.name(second)
            await until(lambda: router.ready("m") and router.plan(ROUTED).places == (second,))
            assert router.connected("m") == {Role.AGGREGATED: 1}
            assert router.capacity("m") == 4 + 1, "and what still runs on the old one"
            with pytest.raises(WorkerLostError):
                fleet.generate(first, REQUEST, Sink())
            assert not old.half_closed.is_set()
            old.send(slots=[0], token_ids=[3], finishes=[finish(0)])
            await until(lambda: bool(running.ends))
            assert isinstance(running.ends[0], Finish)
            assert running.token_ids == [3]
            await until(old.half_closed.is_set)
            old.frames.put_nowait(None)
            await until(lambda: router.capacity("m") == 4)
            assert old.connections == 1, "it is not tried again"


async def test_a_worker_that_is_named_again_is_used_again_while_its_old_link_ends() -> None:
    worker = PlayedWorker()
    async with serving(worker) as address:
        discovery = ToldDiscovery(address)
        async with fleet_of(discovery) as (fleet, router):
            await until(lambda: router.ready("m"))
            running = Sink()
            fleet.generate(address, REQUEST, running)
            discovery.name()
            await until(lambda: not router.ready("m"))
            discovery.name(address)
            await until(lambda: router.ready("m"))
            assert worker.connections == 2
            again = Sink()
            fleet.generate(address, REQUEST, again)
            await until(lambda: len(worker.controls) == 2)
            assert not running.ends


async def test_a_worker_gets_only_what_it_can_do_and_nothing_while_it_drains() -> None:
    worker = PlayedWorker()
    async with (
        serving(worker) as address,
        fleet_of(StaticDiscovery((address,))) as (fleet, router),
    ):
        await until(lambda: router.ready("m"))
        running = Sink()
        fleet.generate(address, REQUEST, running)
        with pytest.raises(WorkerLostError, match="no longer makes images"):
            fleet.diffuse(address, DiffusionRequest(kind=Kind.IMAGE, prompt="p"))
        with pytest.raises(WorkerLostError, match="no longer ranks"):
            await fleet.rerank(address, RerankRequest())
        worker.send(draining=True)
        await until(lambda: not router.ready("m"))
        with pytest.raises(WorkerLostError, match="just disconnected"):
            fleet.generate(address, REQUEST, Sink())
        assert not running.ends


async def test_a_worker_that_drains_is_kept_until_another_does_the_same() -> None:
    """Also if discovery no longer names it, or its health was told first."""
    old, new, health = PlayedWorker(), PlayedWorker(), Health()
    async with serving(old, health) as first, serving(new) as second:
        discovery = ToldDiscovery(first)
        async with fleet_of(discovery) as (fleet, router):
            health.says.put_nowait(SERVING)
            await until(lambda: router.ready("m"))
            health.says.put_nowait(NOT_SERVING)
            await until(lambda: not router.ready("m"))
            old.send(draining=True)
            await until(lambda: router.ready("m"))
            discovery.name()
            fleet.generate(first, REQUEST, Sink())
            await until(lambda: len(old.controls) == 1)
            assert not old.half_closed.is_set()
            discovery.name(second)
            await until(lambda: router.ready("m") and router.plan(ROUTED).places == (second,))
            with pytest.raises(WorkerLostError, match="just disconnected"):
                fleet.generate(first, REQUEST, Sink())
            old.send(slots=[0], token_ids=[3], finishes=[finish(0)])
            await until(old.half_closed.is_set)
            old.frames.put_nowait(None)
            await until(lambda: router.capacity("m") == 4)
            assert old.connections == 1, "it is not tried again"


async def test_a_worker_that_drains_is_kept_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "_KEPT_S", 0.2)
    worker = PlayedWorker()
    async with serving(worker) as address, fleet_of(ToldDiscovery(address)) as (_, router):
        await until(lambda: router.ready("m"))
        worker.send(draining=True)
        await until(worker.half_closed.is_set)
        assert not router.ready("m")


async def test_a_request_waits_for_a_worker_that_may_be_found_soon() -> None:
    """Not longer than a round of discovery, and only where the last one has just left."""
    worker, view = PlayedWorker(), WorkerView("w:1")
    async with serving(worker) as address:
        discovery = ToldDiscovery(address)
        async with fleet_of(discovery, round_s=60.0) as (_, router):
            with pytest.raises(NoWorkerError, match="none has been"):
                await router.found(lambda: router.require("n"))
            await until(lambda: router.ready("m"))
            discovery.name()
            await until(lambda: not router.ready("m"))
            waiting = asyncio.ensure_future(router.found(lambda: router.require("m")))
            router.add(view)  # a change that brings nothing
            await asyncio.sleep(0)
            router.remove(view)
            assert not waiting.done()
            discovery.name(address)
            await waiting
            assert router.ready("m")


async def test_a_request_is_refused_after_a_round_of_discovery() -> None:
    worker = PlayedWorker()
    async with serving(worker) as address:
        discovery = ToldDiscovery(address)
        async with fleet_of(discovery, round_s=0.2) as (_, router):
            await until(lambda: router.ready("m"))
            discovery.name()
            await until(lambda: not router.ready("m"))
            with pytest.raises(NoWorkerError, match="the last one left"):
                await router.found(lambda: router.require("m"))


async def test_closing_fails_what_is_open() -> None:
    async with serving(PlayedWorker()) as address:
        lost = Sink()
        async with fleet_of(ToldDiscovery(address)) as (fleet, router):
            await until(lambda: router.ready("m"))
            fleet.generate(address, REQUEST, lost)
        assert [type(end) for end in lost.ends] == [WorkerLostError]
        with pytest.raises(WorkerLostError):
            fleet.generate("other:1", REQUEST, Sink())


class BreakingDiscovery:
    """Names a worker and breaks; after that another one."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = list(addresses)

    async def watch(self) -> AsyncIterator[Addresses]:
        yield frozenset({self._addresses.pop(0)})
        if self._addresses:
            raise RuntimeError


async def test_a_discovery_that_breaks_keeps_the_workers_it_named_and_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: asyncio.Queue[float] = asyncio.Queue()
    go_on = asyncio.Event()

    async def pause(pause_s: float) -> None:
        pauses.put_nowait(pause_s)
        await go_on.wait()

    monkeypatch.setattr(sources, "pause", pause)
    async with (
        serving(PlayedWorker()) as first,
        serving(PlayedWorker()) as second,
        fleet_of(BreakingDiscovery(first, first, second)) as (_, router),
    ):
        await until(lambda: router.ready("m"))
        assert await pauses.get() == 1.0
        assert router.plan(ROUTED).places == (first,), "it is kept meanwhile"
        go_on.set()
        assert await pauses.get() == 2.0
        await until(lambda: router.ready("m") and router.plan(ROUTED).places == (second,))
