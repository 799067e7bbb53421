"""Serves WorkerService; each method is in a module of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from millstream.v1 import kv_events_pb2, worker_pb2, worker_pb2_grpc
from millstream_server.runtime.rpc.call import Call
from millstream_server.worker.kv_events.log import KvEventLog
from millstream_server.worker.load_report import LoadReports
from millstream_server.worker.loading import Loading
from millstream_server.worker.service.info import InfoWatch
from millstream_server.worker.service.kv_events import watch_kv_events
from millstream_server.worker.service.load import interval_of, watch_load
from millstream_server.worker.service.load_progress import watch_load_progress


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves WorkerService."""

    def __init__(
        self, info: InfoWatch, reports: LoadReports, loading: Loading, kv: KvEventLog | None
    ) -> None:
        """``kv`` None: this worker has no KV events."""
        self._info = info
        self._reports = reports
        self._loading = loading
        self._kv = kv

    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, call: Call
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Describe the worker."""
        return self._info.get()

    async def WatchWorkerInfo(
        self, request: worker_pb2.WatchWorkerInfoRequest, call: Call
    ) -> AsyncIterator[worker_pb2.WatchWorkerInfoResponse]:
        """Describe the worker now and after each change, until it drains."""
        async with aclosing(self._info.watch()) as responses:
            async for response in responses:
                yield response

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, call: Call
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Report the load now and as it changes."""
        interval_s = interval_of(request)
        dp_start = self._info.loaded().dp_start
        async with aclosing(watch_load(self._reports, dp_start, interval_s)) as responses:
            async for response in responses:
                yield response

    async def WatchKvEvents(
        self, request: kv_events_pb2.WatchKvEventsRequest, call: Call
    ) -> AsyncIterator[kv_events_pb2.WatchKvEventsResponse]:
        """Tell what the prefix caches hold, and how it changes."""
        info = self._info.loaded()
        async with aclosing(watch_kv_events(self._kv, info, request)) as responses:
            async for response in responses:
                yield response

    async def WatchLoadProgress(
        self, request: worker_pb2.WatchLoadProgressRequest, call: Call
    ) -> AsyncIterator[worker_pb2.WatchLoadProgressResponse]:
        """Report how far the model is loaded."""
        async with aclosing(watch_load_progress(self._loading)) as responses:
            async for response in responses:
                yield response
