"""Follows one worker: its health, its info, its load, and its start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import worker_pb2, worker_pb2_grpc
from millstream_client import Client, MillstreamError
from millstream_client.errors import from_rpc_error
from millstream_server.cli.connection import Destination, explain_tls
from millstream_server.cli.top.state import Reach, WorkerState

_AGAIN_S = 0.5
_REPORTS_PER_REFRESH = 2
"""So that no refresh of a busy worker is without a new report."""
_SHORTEST_REPORT_S, _LONGEST_REPORT_S = 0.1, 60.0
"""The contract's limits."""
_NO_WORKER = "has no WorkerService: give the addresses of workers, not the Processor's"


class WorkerWatch:
    """Keeps a `WorkerState` current; reconnects for ever."""

    def __init__(
        self, state: WorkerState, server: Destination, client: Client, interval_s: float
    ) -> None:
        """Follow the worker for a screen that is renewed every ``interval_s``."""
        self._state = state
        self._server = server
        self._client = client
        report_s = interval_s / _REPORTS_PER_REFRESH
        self._report_s = min(max(report_s, _SHORTEST_REPORT_S), _LONGEST_REPORT_S)
        self._worker_id = ""

    async def run(self) -> None:
        """Follow until cancelled."""
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
        return [
            self._follow(stub.WatchWorkerInfo, worker_pb2.WatchWorkerInfoRequest(), self._told),
            self._follow(stub.WatchLoad, load, self._loaded),
            self._follow_start(stub),
        ]

    async def _follow(self, method: Any, request: Any, take: Callable[[Any], None]) -> None:
        """Take a stream's messages; open it again until it makes no sense."""
        while True:
            try:
                async for response in method(request, metadata=self._client.metadata()):
                    take(response)
            except grpc.aio.AioRpcError as error:
                failed = from_rpc_error(error)
                if failed.reason == "WORKER_DRAINING":
                    self._state.draining = True
                    return
                if failed.code is not grpc.StatusCode.UNAVAILABLE:
                    self._state.problem = self._why(failed)
                    return
            await asyncio.sleep(_AGAIN_S)

    async def _follow_start(self, stub: Any) -> None:
        """Take the progress of loading, until the worker is ready."""
        request = worker_pb2.WatchLoadProgressRequest()
        while True:
            try:
                async for response in stub.WatchLoadProgress(
                    request, metadata=self._client.metadata()
                ):
                    self._state.progress = response
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    return  # an older worker; `_follow` tells of a server that is none
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    def _told(self, response: worker_pb2.WatchWorkerInfoResponse) -> None:
        state = self._state
        state.info = response.info
        if self._worker_id and state.came_back != "restarted":
            same = self._worker_id == response.info.worker_id
            state.came_back = state.came_back if same else "restarted"
        self._worker_id = response.info.worker_id

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
