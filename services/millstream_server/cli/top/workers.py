"""Follows each worker that is found: its health, its info, its load, its start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from millstream_client import Client, MillstreamError
from millstream_client.errors import from_rpc_error
from millstream_server.cli.client import connect
from millstream_server.cli.flags import Destination, explain_tls
from millstream_server.cli.suite.running import RunningSuite
from millstream_server.cli.top.rows import Reach, WorkerState
from millstream_server.routing.discovery.sources import Addresses, Discovery

_CALL_S = 2.0
_LOOK_S = 0.1
_AGAIN_S = 0.5
_REPORTS_PER_REFRESH = 2
"""So that no refresh of a busy worker is without a new report."""
_SHORTEST_REPORT_S, _LONGEST_REPORT_S = 0.1, 60.0
"""The contract's limits."""
_NO_WORKER = "has no WorkerService: give the addresses of workers, not the Processor's"
_SHOWN_AFTER_S = 60.0
"""How long a worker that discovery no longer names is shown."""


async def follow_conditions(state: WorkerState, admin: Client, interval_s: float) -> None:
    """Keep `WorkerState.conditions` current while the worker isn't serving; until cancelled."""
    async with admin:
        stub = admin_pb2_grpc.AdminServiceStub(admin.channel)
        while True:
            if state.reach is not Reach.REACHED or state.serving is not False:
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                response = await stub.GetServerStatus(
                    admin_pb2.GetServerStatusRequest(), timeout=_CALL_S, metadata=admin.metadata()
                )
            except grpc.aio.AioRpcError:
                state.conditions = ()  # the table shows that it isn't serving
            else:
                state.conditions = tuple(response.status.health_conditions)
            await asyncio.sleep(interval_s)


class WorkerWatch:
    """Keeps a `WorkerState` current; reconnects for ever."""

    def __init__(
        self, state: WorkerState, server: Destination, client: Client, interval_s: float
    ) -> None:
        self._state = state
        self._server = server
        self._client = client
        report_s = interval_s / _REPORTS_PER_REFRESH
        self._report_s = min(max(report_s, _SHORTEST_REPORT_S), _LONGEST_REPORT_S)
        self._worker_id = ""

    async def run(self) -> None:
        async with self._client:
            while True:
                try:
                    await self._follow_connection()
                    self._lost("the server ended the connection")
                except grpc.aio.AioRpcError as error:
                    self._lost(self._why(from_rpc_error(error)))
                await asyncio.sleep(_AGAIN_S)

    async def _follow_connection(self) -> None:
        """Follow from the connection's begin to its end; health is the stream that tells it."""
        stub = health_pb2_grpc.HealthStub(self._client.channel)
        following: list[asyncio.Task[None]] = []
        try:
            async for reply in stub.Watch(health_pb2.HealthCheckRequest()):
                if not following:
                    self._reached()
                    following = [asyncio.create_task(work) for work in self._streams()]
                self._state.serving = reply.status == health_pb2.HealthCheckResponse.SERVING
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    def _streams(self) -> list[Any]:
        stub = worker_pb2_grpc.WorkerServiceStub(self._client.channel)
        load = worker_pb2.WatchLoadRequest()
        load.interval.FromNanoseconds(round(self._report_s * 1_000_000_000))
        progress = worker_pb2.WatchLoadProgressRequest()
        return [
            self._follow(stub.WatchWorkerInfo, worker_pb2.WatchWorkerInfoRequest(), self._told),
            self._follow(stub.WatchLoad, load, self._loaded),
            self._follow(stub.WatchLoadProgress, progress, self._started, once=True),
        ]

    async def _follow(
        self, method: Any, request: Any, take: Callable[[Any], None], *, once: bool = False
    ) -> None:
        """Take a stream's messages; open it again until it makes no sense.

        ``once``: it ends when all is told, and an older worker doesn't have it.
        """
        while True:
            try:
                async for response in method(request, metadata=self._client.metadata()):
                    take(response)
                if once:
                    return
            except grpc.aio.AioRpcError as error:
                failed = from_rpc_error(error)
                if failed.reason == "WORKER_DRAINING" and not once:
                    self._state.draining = True
                    return
                if failed.code is not grpc.StatusCode.UNAVAILABLE:
                    if once:
                        return
                    self._state.problem = self._why(failed)
                    return
            await asyncio.sleep(_AGAIN_S)

    def _told(self, response: worker_pb2.WatchWorkerInfoResponse) -> None:
        state = self._state
        state.info = response.info
        if self._worker_id and state.came_back != "restarted":
            same = self._worker_id == response.info.worker_id
            state.came_back = state.came_back if same else "restarted"
        self._worker_id = response.info.worker_id

    def _started(self, response: worker_pb2.WatchLoadProgressResponse) -> None:
        self._state.progress = response

    def _loaded(self, response: worker_pb2.WatchLoadResponse) -> None:
        self._state.load, self._state.load_s = response.load, time.monotonic()

    def _reached(self) -> None:
        state = self._state
        state.came_back = "back" if state.reach is Reach.LOST and self._worker_id else ""
        state.reach, state.since_s, state.problem = Reach.REACHED, time.monotonic(), ""
        state.draining, state.progress = False, None

    def _lost(self, why: str) -> None:
        state = self._state
        if state.reach is not Reach.LOST:
            state.reach, state.since_s = Reach.LOST, time.monotonic()
        state.load, state.serving, state.problem = None, None, why

    def _why(self, error: MillstreamError) -> str:
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            return _NO_WORKER
        text = explain_tls(error.message, self._server) or error.message
        return " ".join(text.split()) or error.code.name


class Workers:
    """Follows the workers that discovery names; `aclose` it."""

    def __init__(
        self, discovery: Discovery, server: Destination, interval_s: float, suite: RunningSuite
    ) -> None:
        """Connect to each worker as to ``server``; ``suite`` has names and admin ports."""
        self._discovery = discovery
        self._server = server
        self._interval_s = interval_s
        self._admin_key = suite.admin_key
        self._known = {worker.address: worker for worker in suite.workers}
        self._states: dict[str, WorkerState] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._found = False
        self._finding = asyncio.ensure_future(self._find())

    def states(self) -> list[WorkerState]:
        """Return what is known of each worker now.

        Raises:
            ValueError: an address that was found can't be called.
        """
        for task in (self._finding, *self._watches.values()):
            if task.done() and not task.cancelled():
                task.result()
        old = time.monotonic() - _SHOWN_AFTER_S
        for address, state in list(self._states.items()):
            if not state.listed and state.since_s < old:
                del self._states[address]
        return list(self._states.values())

    @property
    def settled(self) -> bool:
        return self._found and all(state.settled for state in self._states.values())

    async def aclose(self) -> None:
        tasks = [self._finding, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _find(self) -> None:
        async for addresses in self._discovery.watch():
            self._apply(addresses)
            self._found = True

    def _apply(self, addresses: Addresses) -> None:
        for address in addresses - self._watches.keys():
            known = self._known.get(address)
            name, admin = (known.name, known.admin) if known else ("", "")
            state = WorkerState(address, name, since_s=time.monotonic())
            self._states[address] = state
            self._watches[address] = asyncio.ensure_future(self._follow(state, admin))
        for address in self._watches.keys() - addresses:
            self._watches.pop(address).cancel()
            self._states[address].listed = False
            self._states[address].since_s = time.monotonic()

    async def _follow(self, state: WorkerState, admin_address: str) -> None:
        server = replace(self._server, address=state.address)
        watch = WorkerWatch(state, server, connect(server), self._interval_s)
        works = [watch.run()]
        if admin_address:
            admin = connect(replace(self._server, address=admin_address, api_key=self._admin_key))
            works.append(follow_conditions(state, admin, self._interval_s))
        await asyncio.gather(*works)
