"""A worker's load as it reports it, over the wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
from google.protobuf.duration_pb2 import Duration

from millstream.v1 import worker_pb2, worker_pb2_grpc


class LoadWatch:
    """The newest report of one worker, every 100 ms."""

    def __init__(self) -> None:
        self.last: worker_pb2.LoadReport | None = None
        self._changed = asyncio.Condition()

    async def until(
        self, condition: Callable[[worker_pb2.LoadReport], bool], within_s: float
    ) -> worker_pb2.LoadReport:
        """Wait for a report that satisfies ``condition``."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                while self.last is None or not condition(self.last):
                    await self._changed.wait()
        except TimeoutError:
            message = f"not within {within_s} s; the last report is {self.last}"
            raise AssertionError(message) from None
        return self.last

    async def idle(self, within_s: float) -> None:
        """Wait until nothing runs, nothing queues and every KV block is free."""
        await self.until(
            lambda load: not (load.running_requests or load.queued_requests or load.used_blocks),
            within_s,
        )

    async def busy(self, within_s: float) -> None:
        """Wait until something runs or queues."""
        await self.until(lambda load: bool(load.running_requests or load.queued_requests), within_s)

    async def follow(self, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        interval = Duration()
        interval.FromMilliseconds(100)
        async for response in stub.WatchLoad(worker_pb2.WatchLoadRequest(interval=interval)):
            async with self._changed:
                self.last = response.load
                self._changed.notify_all()


@contextlib.asynccontextmanager
async def load_of(address: str) -> AsyncIterator[LoadWatch]:
    """Follow a worker's load."""
    async with grpc.aio.insecure_channel(address) as channel:
        watch = LoadWatch()
        task = asyncio.ensure_future(watch.follow(worker_pb2_grpc.WorkerServiceStub(channel)))
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.wait([task])
