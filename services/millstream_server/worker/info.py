"""WorkerService: describes this worker and reports its load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from millstream.v1 import worker_pb2, worker_pb2_grpc
from millstream_server.engines.base import Engine, EngineLoad, WorkerDescription
from millstream_server.runtime.errors import (
    InvalidRequestError,
    UnavailableError,
    WorkerDrainingError,
)
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.rpc.call import Call
from millstream_server.worker.watched import Watched

SERVICE = "millstream.v1.WorkerService"
LONG_STREAMS = frozenset({f"{SERVICE}/WatchLoad", f"{SERVICE}/WatchWorkerInfo"})
"""Methods whose streams last as long as a connection; they get no spans."""

_MIN_INTERVAL_S, _MAX_INTERVAL_S, _DEFAULT_INTERVAL_S = 0.1, 60.0, 1.0
_QUIET_INTERVALS = 10  # an unchanged load is repeated after this many intervals

Describe = Callable[[WorkerDescription], worker_pb2.WorkerInfo]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves WorkerService."""

    def __init__(
        self,
        engine: Engine,
        description: Watched[WorkerDescription],
        describe: Describe,
        work: OpenWork,
    ) -> None:
        """Convert ``description`` with ``describe``; streams end when ``work`` drains."""
        self._engine = engine
        self._description = description
        self._describe = describe
        self._work = work

    async def GetWorkerInfo(  # noqa: N802
        self, request: worker_pb2.GetWorkerInfoRequest, call: Call
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Describe the worker."""
        if self._work.leaving:
            raise _draining()
        return worker_pb2.GetWorkerInfoResponse(info=self._describe(self._loaded()))

    async def WatchWorkerInfo(  # noqa: N802
        self, request: worker_pb2.WatchWorkerInfoRequest, call: Call
    ) -> AsyncIterator[worker_pb2.WatchWorkerInfoResponse]:
        """Describe the worker now and after each change, until it drains."""
        changed = asyncio.Event()
        forget = (
            self._description.listen(changed.set),
            self._work.when_leaving(changed.set),
        )
        sent: WorkerDescription | None = None
        try:
            while not self._work.leaving:
                description = self._description.value
                if description is not None and description is not sent:
                    sent = description
                    yield worker_pb2.WatchWorkerInfoResponse(info=self._describe(description))
                else:
                    await changed.wait()
                    changed.clear()
        finally:
            for undo in forget:
                undo()
        raise _draining()

    async def WatchLoad(  # noqa: N802
        self, request: worker_pb2.WatchLoadRequest, call: Call
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Report the load now and as it changes."""
        interval_s = _DEFAULT_INTERVAL_S
        if request.HasField("interval"):
            interval_s = request.interval.ToNanoseconds() / 1e9
            if not _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S:
                raise InvalidRequestError.of("interval", "must be from 0.1 s to 60 s")
        self._loaded()
        last: EngineLoad | None = None
        quiet = 0
        while True:
            load = await self._engine.load()
            if load != last or quiet >= _QUIET_INTERVALS:
                last, quiet = load, 0
                yield worker_pb2.WatchLoadResponse(
                    load=worker_pb2.LoadReport(
                        running_requests=load.running_requests,
                        queued_requests=load.queued_requests,
                        used_blocks=load.used_blocks,
                        total_blocks=load.total_blocks,
                    )
                )
            quiet += 1
            await asyncio.sleep(interval_s)

    def _loaded(self) -> WorkerDescription:
        description = self._description.value
        if description is None:
            raise UnavailableError("this worker is still loading its model", retry_delay_s=1.0)
        return description


def _draining() -> WorkerDrainingError:
    return WorkerDrainingError("this worker is shutting down; retry on another one")
