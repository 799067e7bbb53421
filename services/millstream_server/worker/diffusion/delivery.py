"""Delivers one request's outputs: writes each one's file, then sends or stores it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from millstream_server.media.frames import Frames
from millstream_server.runtime.rpc.slot_session import Output
from millstream_server.runtime.telemetry.metrics import DIFFUSION_FILE_BYTES, DIFFUSION_FILES
from millstream_server.synthesis.output import MAX_CHUNK_BYTES, Chunk, OutputFile, Progress
from millstream_server.synthesis.request import DiffusionRequest, DiffusionSettings
from millstream_server.worker.diffusion.engine import HostedDiffuser, in_thread
from millstream_server.worker.diffusion.files import EXTENSIONS, write_file
from millstream_server.worker.diffusion.stages import Stage, Stages
from millstream_server.worker.diffusion.storage import StoredFile

_CHUNK_OVERHEAD = 64


class Deliveries:
    """The outputs of one request, delivered in order while the next one is being made.

    A caller that reads slowly holds up its own deliveries only, not the device.
    """

    def __init__(
        self,
        engine: HostedDiffuser,
        request: DiffusionRequest,
        settings: DiffusionSettings,
        output: Output[Progress | Chunk],
        stages: Stages,
    ) -> None:
        """Deliver to ``output``, or to the engine's storage if the request says so."""
        self._engine = engine
        self._request = request
        self._settings = settings
        self._output = output
        self._stages = stages
        self._tasks: list[asyncio.Task[OutputFile]] = []
        self._stored: list[StoredFile] = []

    @contextlib.asynccontextmanager
    async def undone_on_failure(self) -> AsyncIterator[None]:
        """Stop the deliveries and remove what was stored, if the ``with`` block raises."""
        try:
            yield
        except BaseException:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            storage = self._engine.options.storage
            if storage is not None:
                for stored in self._stored:
                    await storage.remove(stored)
            raise

    def add(self, frames: Frames) -> None:
        """Deliver the next output."""
        index = len(self._tasks)
        before = self._tasks[-1] if self._tasks else None
        self._tasks.append(asyncio.create_task(self._deliver(index, frames, before)))

    def check(self) -> None:
        """Raise the failure of a delivery that has failed, if there is one."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def all(self) -> tuple[OutputFile, ...]:
        """Wait until all outputs are delivered.

        Raises:
            ServingError: one can't be.
        """
        return tuple([await task for task in self._tasks])

    async def _deliver(
        self, index: int, frames: Frames, before: asyncio.Task[OutputFile] | None
    ) -> OutputFile:
        request, settings = self._request, self._settings
        with self._stages.timed(Stage.WRITE):
            threads = self._engine.file_threads
            data = await in_thread(threads, write_file, frames, request, settings, index)
        if before is not None:
            await asyncio.wait({before})
            before.result()
        with self._stages.timed(Stage.DELIVER):
            url = await (self._store(data) if request.to_url else self._send(index, data))
        DIFFUSION_FILES.labels(request.format.value).inc()
        DIFFUSION_FILE_BYTES.labels(request.format.value).inc(len(data))
        return OutputFile(
            seed=settings.seed_of(index), total_bytes=len(data), format=request.format, url=url
        )

    async def _send(self, index: int, data: bytes) -> str:
        for start in range(0, len(data), MAX_CHUNK_BYTES):
            end = start + MAX_CHUNK_BYTES
            chunk = Chunk(index, data[start:end], end >= len(data))
            await self._output.put(chunk, len(chunk.data) + _CHUNK_OVERHEAD)
        return ""

    async def _store(self, data: bytes) -> str:
        storage = self._engine.options.storage
        assert storage is not None  # noqa: S101 - the request was checked
        extension = EXTENSIONS[self._request.format]
        stored = await storage.write(self._request.request_id, extension, data)
        self._stored.append(stored)
        return stored.url
