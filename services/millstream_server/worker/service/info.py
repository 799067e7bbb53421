"""GetWorkerInfo and WatchWorkerInfo: what this worker is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from millstream.v1 import worker_pb2
from millstream_server.engines.base import WorkerDescription
from millstream_server.runtime.errors import UnavailableError, WorkerDrainingError
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.worker.watched import Watched

Describe = Callable[[WorkerDescription], worker_pb2.WorkerInfo]


class InfoWatch:
    """Tells the worker's info and its changes."""

    def __init__(
        self, description: Watched[WorkerDescription], describe: Describe, work: OpenWork
    ) -> None:
        """Convert ``description`` with ``describe``; streams end when ``work`` drains."""
        self._description = description
        self._describe = describe
        self._work = work

    def loaded(self) -> worker_pb2.WorkerInfo:
        """Return the worker's info, also while it drains.

        Raises:
            UnavailableError: the model is being loaded.
        """
        description = self._description.value
        if description is None:
            raise UnavailableError("this worker is still loading its model", retry_delay_s=1.0)
        return self._describe(description)

    def get(self) -> worker_pb2.GetWorkerInfoResponse:
        """Describe the worker.

        Raises:
            WorkerDrainingError: it shuts down.
            UnavailableError: the model is being loaded.
        """
        if self._work.leaving:
            raise _draining()
        return worker_pb2.GetWorkerInfoResponse(info=self.loaded())

    async def watch(self) -> AsyncGenerator[worker_pb2.WatchWorkerInfoResponse, None]:
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


def _draining() -> WorkerDrainingError:
    return WorkerDrainingError("this worker is shutting down; retry on another one")
