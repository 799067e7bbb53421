"""A Processor's link to one worker: description, load, health, reconnection.

For each connection the link makes the streams of the worker's abilities, tells them when to finish,
and when the connection is lost. Its `WorkerStatus` says whether the worker accepts requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable
from typing import Any

from grpc_health.v1 import health_pb2

from millstream.v1 import worker_pb2
from millstream_server.control.engine import WorkerDescription
from millstream_server.diffusion.diffuser import DiffuserInfo
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.encode.encoder import EncoderInfo
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.links.channel import CallError, Channel, Rpc, rpc_of
from millstream_server.links.encode_stream import EncodeStream
from millstream_server.links.entry_stream import DIFFUSION, EntryStream, VectorStream
from millstream_server.links.generation_stream import GenerationStream
from millstream_server.links.kv_watch import KvWatch
from millstream_server.links.slot_stream import Connection, SlotStream
from millstream_server.links.unread import UnreadOutput
from millstream_server.routing.prefix.prefixes import Prefixes
from millstream_server.routing.workers import WorkerView, info_of
from millstream_server.runtime.errors import Code
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import WORKERS_CONNECTED, WORKERS_LOST
from millstream_server.worker_info import description_from_proto, load_from_proto

log = get_log(__name__)

_RETRY_S = 0.5
_INFO_TIMEOUT_S = 5.0
_KEPT_S = 45.0
"""How long a worker that drains is kept while there is no other: a DNS answer may be 30 s old."""
_SILENCE_S = 30.0
"""A worker reports its load at least every 10 s; one that misses three reports counts as stuck.
gRPC's pings don't show that: its own threads answer them, even if the event loop hangs."""

_GET_INFO = rpc_of(worker_pb2.DESCRIPTOR, "WorkerService/GetWorkerInfo")
_WATCH_INFO = rpc_of(worker_pb2.DESCRIPTOR, "WorkerService/WatchWorkerInfo")
_WATCH_LOAD = rpc_of(worker_pb2.DESCRIPTOR, "WorkerService/WatchLoad")
_WATCH_HEALTH = rpc_of(health_pb2.DESCRIPTOR, "Health/Watch")


class WorkerStreams:
    """The streams of one connection to a worker, by ability; None: the worker doesn't have it."""

    def __init__(self, connection: Connection, unread: UnreadOutput) -> None:
        """Make those that the worker's description names; ``unread``: see `EntryStream`."""
        worker = connection.description
        diffuser = info_of(worker, DiffuserInfo)
        kinds = diffuser.kinds if diffuser else ()
        self.text = GenerationStream(connection) if info_of(worker, GeneratorInfo) else None
        self.media = EncodeStream(connection) if info_of(worker, EncoderInfo) else None
        self.diffusion = {kind: EntryStream(connection, DIFFUSION[kind], unread) for kind in kinds}
        self.vectors = VectorStream(connection, unread) if info_of(worker, EmbedderInfo) else None
        found = (self.text, self.vectors, *self.diffusion.values(), self.media)
        self.all: list[SlotStream[Any]] = [stream for stream in found if stream is not None]
        """The engine's own come first."""

    async def run(self) -> None:
        """Serve until all have ended; a stream that breaks ends the others.

        No TaskGroup: in Python 3.11 one whose task fails leaves its parent marked as cancelled, and
        the link would take a lost worker for its own end.
        """
        tasks = [asyncio.ensure_future(stream.run()) for stream in self.all]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class WorkerLink:
    """Keeps one worker connected. It accepts requests while `view.description` is set."""

    def __init__(
        self,
        address: str,
        open_channel: Callable[[str], Channel],
        on_change: Callable[[], None],
        *,
        is_last: Callable[[WorkerView], bool] = lambda _: False,
        prefixes: Prefixes | None = None,
        unread: UnreadOutput | None = None,
    ) -> None:
        """Link to ``address``; ``on_change`` is called after a change of `view.description`.

        ``is_last`` tells whether a worker that drains is to be kept, until `let_go`.
        KV events are followed for ``prefixes``; None: they aren't. ``unread`` bounds the output
        that gathers.
        """
        self.view = WorkerView(address)
        self.status = WorkerStatus(self.view, on_change)
        self.streams: WorkerStreams | None = None
        """Those of the current connection."""
        self._open_channel = open_channel
        self._is_last = is_last
        self._unread = unread or UnreadOutput()
        self._kv = KvWatch(prefixes, self.view) if prefixes else None
        self._closed = False

    async def run(self) -> None:
        """Connect, serve, reconnect; until cancelled, or retired and no request is open."""
        while not self.status.retired:
            async with contextlib.aclosing(self._open_channel(self.view.address)) as channel:
                while not channel.stale:
                    await self._connect(channel)
                    if self.status.retired or self._closed:
                        return
                    await asyncio.sleep(_RETRY_S)

    def retire(self) -> None:
        """Accept no new requests; `run` returns once the open ones have ended."""
        self._leave(WorkerCondition.RETIRED)

    def let_go(self) -> None:
        """Accept no new requests if it is kept although it drains."""
        if self.status.kept:
            self._leave(WorkerCondition.DRAINING)

    def _drains(self) -> None:
        if not self._is_last(self.view):
            self._leave(WorkerCondition.DRAINING)
        elif not self.status.kept:
            self.status.keep()
            asyncio.get_running_loop().call_later(_KEPT_S, self.let_go)

    def close(self) -> None:
        """Connect no more; called before `run` is cancelled.

        Up to Python 3.12 a TaskGroup loses a cancel that comes while it handles a failure, such as
        that of a worker that stops at the same time.
        """
        self._closed = True

    def _leave(self, condition: WorkerCondition) -> None:
        self.status.set(condition)
        self._finish()

    def _finish(self) -> None:
        for stream in self.streams.all if self.streams else ():
            stream.finish()

    async def _connect(self, channel: Channel) -> None:
        """Serve one connection until it ends; log the cause."""
        try:
            await self._serve(channel)
        except* CallError as errors:
            log.debug("worker connection broke", worker=self.view.address, reason=str(errors))
        # A message that can't be read must not end the link: reconnect.
        except* Exception as errors:  # noqa: BLE001
            log.error("worker broke the protocol", worker=self.view.address, error=errors)

    async def _serve(self, channel: Channel) -> None:
        response = await channel.call(
            _GET_INFO, worker_pb2.GetWorkerInfoRequest(), timeout_s=_INFO_TIMEOUT_S, wait=True
        )
        description = description_from_proto(response.info)
        connection = Connection(channel, description, self.view, self._drains)
        streams = WorkerStreams(connection, self._unread)
        health_service = streams.all[0].rpc.service
        self.status.connected(description)
        self.streams = streams
        if self.status.retired:  # retired while it was not connected
            self._finish()
        async with asyncio.TaskGroup() as group:
            watches = [
                group.create_task(self._watch_load(channel)),
                group.create_task(self._watch_health(channel, health_service)),
                group.create_task(self._watch_info(channel)),
            ]
            if self._kv:
                watches.append(group.create_task(self._kv.run(channel, description)))
            try:
                await streams.run()
            finally:
                self.streams = None
                task = asyncio.current_task()
                self.status.disconnected(expected=bool(task and task.cancelling()))
                for stream in streams.all:
                    stream.close()
                for watch in watches:
                    watch.cancel()

    # ---- what the worker reports -----------------------------------------------------------------

    async def _watch_load(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(_SILENCE_S, self.status.set, WorkerCondition.SILENT)

        def expect_report() -> None:
            nonlocal alarm
            alarm.cancel()
            alarm = loop.call_later(_SILENCE_S, self.status.set, WorkerCondition.SILENT)

        def take(response: worker_pb2.WatchLoadResponse) -> None:
            self.view.report(load_from_proto(response.load))
            expect_report()
            self.status.clear(WorkerCondition.SILENT)

        offered = True
        while offered:
            expect_report()
            request = worker_pb2.WatchLoadRequest()
            try:
                offered = await self._watch(channel, _WATCH_LOAD, request, take)
            finally:
                alarm.cancel()
                self.view.report(None)  # an old report could keep requests away
            self.status.clear(WorkerCondition.SILENT)  # no watch, so no reports are expected
            await asyncio.sleep(_RETRY_S)

    async def _watch_health(self, channel: Channel, service: str) -> None:
        """Follow the worker's health. When the watch ends, the last state stays."""

        def take(response: Any) -> None:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                self.status.clear(WorkerCondition.NOT_SERVING)
            else:
                self.status.set(WorkerCondition.NOT_SERVING)

        request = health_pb2.HealthCheckRequest(service=service)
        offered = True
        while offered:
            offered = await self._watch(channel, _WATCH_HEALTH, request, take)
            await asyncio.sleep(_RETRY_S if offered else 0)
        self.status.clear(WorkerCondition.NOT_SERVING)  # the worker has no health service

    async def _watch_info(self, channel: Channel) -> None:
        """Follow the worker's info. An older worker has no watch; its info is constant."""

        def take(response: worker_pb2.WatchWorkerInfoResponse) -> None:
            self.status.describe(description_from_proto(response.info))

        offered = True
        while offered:
            request = worker_pb2.WatchWorkerInfoRequest()
            offered = await self._watch(channel, _WATCH_INFO, request, take)
            await asyncio.sleep(_RETRY_S)

    async def _watch(
        self, channel: Channel, rpc: Rpc, request: Any, take: Callable[[Any], None]
    ) -> bool:
        """Read a watch to its end; return whether the worker offers it."""
        watch = channel.watch(rpc, request)
        try:
            while (response := await watch.read()) is not None:
                take(response)
        except CallError as error:
            log.debug("watch ended", worker=self.view.address, code=error.code.name)
            return error.code is not Code.UNIMPLEMENTED
        finally:
            watch.cancel()
        return True


# ---- whether a worker accepts requests, and if not, why ------------------------------------------


class WorkerCondition(enum.Enum):
    """Why a worker gets no new requests."""

    NOT_CONNECTED = "not connected"
    NOT_SERVING = "not serving"
    """Its health isn't known to be SERVING; for instance, its engine may be stuck."""
    SILENT = "silent"
    """It has stopped reporting its load."""
    DRAINING = "draining"
    """It is shutting down."""
    RETIRED = "retired"
    """Discovery no longer names it."""


_EXPECTED = frozenset({WorkerCondition.DRAINING, WorkerCondition.RETIRED})


class WorkerStatus:
    """Sets `WorkerView.description` from conditions and description: None while one holds."""

    def __init__(self, view: WorkerView, on_change: Callable[[], None]) -> None:
        """Start as not connected; ``on_change`` is called after a change of `view.description`."""
        self.conditions = {WorkerCondition.NOT_CONNECTED}
        self.kept = False
        """It drains, and still accepts requests: its health doesn't count."""
        self._view = view
        self._on_change = on_change
        self._description: WorkerDescription | None = None

    @property
    def retired(self) -> bool:
        return WorkerCondition.RETIRED in self.conditions

    def connected(self, description: WorkerDescription) -> None:
        """Record a new connection; the worker accepts no requests before its health is SERVING."""
        self._description, self.kept = description, False
        self.conditions = {WorkerCondition.NOT_SERVING} | (
            self.conditions & {WorkerCondition.RETIRED}
        )
        log.info(
            "worker connected",
            worker=self._view.address,
            id=description.worker_id,
            role=description.role.value,
            model=description.model,
        )
        self._update()

    def disconnected(self, *, expected: bool) -> None:
        """Record that the connection has ended; ``expected``: because this process closed it."""
        description, self._description = self._description, None
        leaving, self.kept = self.kept or self.conditions & _EXPECTED, False
        if description and not leaving:
            log.warning(
                "worker disconnected",
                worker=self._view.address,
                open_requests=self._view.in_flight,
            )
            if not expected:
                WORKERS_LOST.labels(description.role.value).inc()
        self.conditions = {WorkerCondition.NOT_CONNECTED} | (
            self.conditions & {WorkerCondition.RETIRED}
        )
        self._view.report(None)
        self._update()

    def describe(self, description: WorkerDescription) -> None:
        """Set the worker's current description.

        Raises:
            ValueError: its role has changed, which needs a new connection.
        """
        known = self._description
        if known is None or description == known:
            return
        if description.role is not known.role:
            message = f"the worker was {known.role.value} and is now {description.role.value}"
            raise ValueError(message)
        self._description = description
        self._update()

    def keep(self) -> None:
        """Accept requests although the worker drains, until another condition is set."""
        log.info("worker drains and is kept: no other does the same", worker=self._view.address)
        self.kept = True
        self._update()

    def set(self, condition: WorkerCondition) -> None:
        self.kept &= condition is WorkerCondition.NOT_SERVING
        if condition not in self.conditions:
            self.conditions.add(condition)
            write = log.warning if condition is WorkerCondition.SILENT else log.info
            write("worker condition set", worker=self._view.address, condition=condition.value)
            self._update()

    def clear(self, condition: WorkerCondition) -> None:
        if condition in self.conditions:
            self.conditions.remove(condition)
            log.info(
                "worker condition cleared", worker=self._view.address, condition=condition.value
            )
            self._update()

    def _update(self) -> None:
        view = self._view
        barred = self.conditions - ({WorkerCondition.NOT_SERVING} if self.kept else set())
        before, now = view.description, None if barred else self._description
        if before is now:
            return
        view.description = now
        view.last_description = now or view.last_description
        for description, count in ((before, -1), (now, 1)):
            if description is not None:
                WORKERS_CONNECTED.labels(description.model, description.role.value).inc(count)
        self._on_change()
