"""WorkerService: what this worker is and how loaded it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from millstream.v1 import worker_pb2, worker_pb2_grpc
from millstream_server.engines.base import Engine, EngineInfo, EngineLoad, Role
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    InvalidRequestError,
    UnavailableError,
    WorkerDrainingError,
)
from millstream_server.worker_stream.description import WorkerDescription, description_to_proto

_MIN_INTERVAL_S, _MAX_INTERVAL_S, _DEFAULT_INTERVAL_S = 0.1, 60.0, 1.0
_QUIET_INTERVALS = 10  # an unchanged load is repeated after so many intervals


class WorkerInfoServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Answers from the engine."""

    def __init__(self, engine: Engine, role: Role, model: str, work: OpenWork) -> None:
        """Describe a worker that serves ``model`` with ``engine``; `ready` completes it.

        Once its ``work`` drains it describes itself no more: nobody new shall come to it.
        """
        self._work = work
        self._engine = engine
        self._role = role
        self._model = model
        self._info: worker_pb2.WorkerInfo | None = None

    def ready(self, info: EngineInfo) -> None:
        """The engine is loaded and warm."""
        self._info = description_to_proto(
            WorkerDescription(role=self._role, model=self._model, engine=info)
        )

    async def GetWorkerInfo(  # noqa: N802
        self, request: worker_pb2.GetWorkerInfoRequest, context: Any
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Describe the worker."""
        if self._work.leaving:
            raise WorkerDrainingError("this worker is shutting down; retry on another one")
        return worker_pb2.GetWorkerInfoResponse(info=self._loaded())

    async def WatchLoad(  # noqa: N802
        self, request: worker_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Push the load as it changes."""
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

    def _loaded(self) -> worker_pb2.WorkerInfo:
        if self._info is None:
            raise UnavailableError("this worker is still loading its model", retry_delay_s=1.0)
        return self._info
