"""A Processor's link to one worker: description, load, health, reconnection.

A link knows nothing of what is asked of the worker. An ability puts its own calls on it: the link
makes them (`AbilityCalls`) for each connection, and tells them when to finish and when all is lost.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import worker_pb2, worker_pb2_grpc
from millstream_server.engines.base import WorkerDescription
from millstream_server.links.kv_watch import KvWatch
from millstream_server.links.silence import SilenceAlarm
from millstream_server.links.status import WorkerCondition, WorkerStatus
from millstream_server.protobuf.worker import description_from_proto, load_from_proto
from millstream_server.routing.prefix.prefixes import Prefixes
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import WorkerLostError
from millstream_server.runtime.rpc.channel import channel_options, open_channel
from millstream_server.runtime.security.tls import ClientTls
from millstream_server.runtime.telemetry.client_rpcs import observe_call, unary_client_interceptors
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.tracing import Tracing

log = get_log(__name__)

# Frames gather while the Processor is busy, so they may be large. But they gather in the worker, as
# columns, and not as bytes on the way: what a new request sends and gets waits behind those bytes.
# gRPC's own window grows to megabytes, which is a second of a busy Processor's work.
_WINDOW_BYTES = 64 << 10
_CHANNEL_OPTIONS = [
    # Workers send 3 MiB at once, but for a single thing: 11 MB of a long prompt's logprobs.
    *channel_options(max_receive_bytes=16 << 20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
]
_RETRY_S = 0.5
_INFO_TIMEOUT_S = 5.0
_SILENCE_S = 30.0
"""A worker reports its load at least every 10 s; one that misses three reports counts as stuck.
gRPC's pings don't show that: its own threads answer them, even if the event loop hangs."""
_SERVICE = "millstream.v1.WorkerService"


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection to a worker, for an ability's calls."""

    channel: grpc.aio.Channel
    description: WorkerDescription
    view: WorkerView
    """The ability's calls update `in_flight` and `in_use`, the link the rest."""
    on_draining: Callable[[], None]
    """The ability's calls call it when the worker announces its shutdown on their stream."""


class AbilityCalls(Protocol):
    """An ability's calls on one connection; made for each new connection, used until `close`."""

    @property
    def health_service(self) -> str:
        """The service whose health decides whether the worker gets requests."""
        ...

    async def run(self) -> None:
        """Serve; returns, or raises any exception, when the connection is over."""
        ...

    def finish(self) -> None:
        """Let `run` return as soon as no request is open; no new ones are started."""
        ...

    def close(self) -> None:
        """Fail all open requests: the connection has ended. Called once, after `run`."""
        ...


C = TypeVar("C", bound=AbilityCalls)


class WorkerLink(Generic[C]):
    """Keeps one worker connected. It accepts requests while `view.description` is set."""

    def __init__(
        self,
        address: str,
        make_calls: Callable[[Connection], C],
        on_change: Callable[[], None],
        *,
        prefixes: Prefixes | None = None,
        tls: ClientTls | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Link to ``address``; ``on_change`` is called after a change of `view.description`.

        KV events are followed for ``prefixes``; None: they aren't.
        """
        self.view = WorkerView(address)
        self._kv = KvWatch(prefixes, self.view) if prefixes else None
        self.calls: C | None = None
        """The calls on the current connection."""
        self.status = WorkerStatus(self.view, on_change)
        self._make_calls = make_calls
        self._closed = False
        self._tls = tls
        self._tracing = tracing

    async def run(self) -> None:
        """Connect, serve, reconnect; until cancelled, or retired and no request is open.

        Changed certificates need a new channel.
        """
        while not self.status.retired:
            async with open_channel(
                self.view.address,
                self._tls,
                options=_CHANNEL_OPTIONS,
                interceptors=unary_client_interceptors(self._tracing, self.view.address),
            ) as channel:
                while not (self._tls and self._tls.changed()):
                    await self._connect(channel)
                    if self.status.retired or self._closed:
                        return
                    await asyncio.sleep(_RETRY_S)

    def require(self) -> C:
        """Return the calls on the current connection, for a new request.

        Raises:
            WorkerLostError: the worker accepts no requests now.
        """
        if self.calls is None or self.view.description is None:
            raise WorkerLostError("the worker just disconnected; retry")
        return self.calls

    def retire(self) -> None:
        """Accept no new requests; `run` returns once the open ones have ended."""
        self._leave(WorkerCondition.RETIRED)

    def close(self) -> None:
        """Connect no more; called before `run` is cancelled.

        Up to Python 3.12 a TaskGroup loses a cancel that comes while it handles a failure, such as
        that of a worker that stops at the same time.
        """
        self._closed = True

    def _leave(self, condition: WorkerCondition) -> None:
        self.status.set(condition)
        if self.calls:
            self.calls.finish()

    async def _connect(self, channel: grpc.aio.Channel) -> None:
        """Serve one connection until it ends; log the cause."""
        try:
            await self._serve(channel)
        except* grpc.aio.AioRpcError as errors:
            log.debug("worker connection broke", worker=self.view.address, reason=str(errors))
        # A message that can't be read must not end the link: reconnect.
        except* Exception as errors:  # noqa: BLE001
            log.error("worker broke the protocol", worker=self.view.address, error=errors)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        service = worker_pb2_grpc.WorkerServiceStub(channel)
        response = await service.GetWorkerInfo(
            worker_pb2.GetWorkerInfoRequest(), timeout=_INFO_TIMEOUT_S, wait_for_ready=True
        )
        description = description_from_proto(response.info)
        draining = functools.partial(self._leave, WorkerCondition.DRAINING)
        calls = self._make_calls(Connection(channel, description, self.view, draining))
        self.status.connected(description)
        self.calls = calls
        if self.status.retired:  # retired while it was not connected
            calls.finish()
        async with asyncio.TaskGroup() as group:
            watches = [
                group.create_task(self._watch_load(service)),
                group.create_task(self._watch_health(channel, calls.health_service)),
                group.create_task(self._watch_info(service)),
            ]
            if self._kv:
                watches.append(group.create_task(self._kv.run(service, description)))
            try:
                await calls.run()
            finally:
                self.calls = None
                task = asyncio.current_task()
                self.status.disconnected(expected=bool(task and task.cancelling()))
                calls.close()
                for watch in watches:
                    watch.cancel()

    # ---- what the worker reports -----------------------------------------------------------------

    async def _watch_load(self, service: worker_pb2_grpc.WorkerServiceStub) -> None:
        alarm = SilenceAlarm(_SILENCE_S, lambda: self.status.set(WorkerCondition.SILENT))

        def take(response: worker_pb2.WatchLoadResponse) -> None:
            self.view.report(load_from_proto(response.load))
            alarm.restart()
            self.status.clear(WorkerCondition.SILENT)

        offered = True
        while offered:
            alarm.restart()
            try:
                call: Any = service.WatchLoad(worker_pb2.WatchLoadRequest())
                observe_call(call, f"{_SERVICE}/WatchLoad")
                offered = await self._read(call, take)
            finally:
                alarm.stop()
                self.view.report(None)  # an old report could keep requests away
            self.status.clear(WorkerCondition.SILENT)  # no watch, so no reports are expected
            await asyncio.sleep(_RETRY_S)

    async def _watch_health(self, channel: grpc.aio.Channel, service: str) -> None:
        """Follow the worker's health. When the watch ends, the last state stays."""

        def take(response: Any) -> None:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                self.status.clear(WorkerCondition.NOT_SERVING)
            else:
                self.status.set(WorkerCondition.NOT_SERVING)

        stub = health_pb2_grpc.HealthStub(channel)
        offered = True
        while offered:
            call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
            offered = await self._read(call, take)
            await asyncio.sleep(_RETRY_S if offered else 0)
        self.status.clear(WorkerCondition.NOT_SERVING)  # the worker has no health service

    async def _watch_info(self, service: worker_pb2_grpc.WorkerServiceStub) -> None:
        """Follow the worker's info. An older worker has no watch; its info is constant."""

        def take(response: worker_pb2.WatchWorkerInfoResponse) -> None:
            self.status.describe(description_from_proto(response.info))

        offered = True
        while offered:
            call: Any = service.WatchWorkerInfo(worker_pb2.WatchWorkerInfoRequest())
            observe_call(call, f"{_SERVICE}/WatchWorkerInfo")
            offered = await self._read(call, take)
            await asyncio.sleep(_RETRY_S)

    async def _read(self, watch: Any, take: Callable[[Any], None]) -> bool:
        """Read a watch to its end; return whether the worker offers it."""
        try:
            async for response in watch:
                take(response)
        except grpc.aio.AioRpcError as error:
            log.debug("watch ended", worker=self.view.address, code=error.code().name)
            return error.code() is not grpc.StatusCode.UNIMPLEMENTED
        return True
