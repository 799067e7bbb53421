"""How a worker serves a request: check, admit, queue, make its outputs, deliver them."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from millstream_server.diffusion.checks import check_tokens, jobs, outputs_of, resolve
from millstream_server.diffusion.diffuser import Step
from millstream_server.diffusion.request import (
    MAX_CHUNK_BYTES,
    Chunk,
    DiffusionRequest,
    DiffusionSettings,
    Finished,
    OutputFile,
    Progress,
)
from millstream_server.diffusion.worker.engine import HostedDiffuser, in_thread
from millstream_server.diffusion.worker.files import EXTENSIONS, StoredFile, write_file
from millstream_server.media import writing
from millstream_server.media.items import Frames
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.rpc.slot_session import Output
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import (
    DIFFUSION_FILE_BYTES,
    DIFFUSION_FILES,
    DIFFUSION_STAGE_DURATION,
    DIFFUSION_STEP_DURATION,
    DIFFUSION_STEPS,
)
from millstream_server.runtime.threads import DaemonThreads
from millstream_server.worker.open_requests import OpenRequests, Stages

log = get_log(__name__)

_CHUNK_OVERHEAD = 64
DiffusionOutput = Output[Progress | Chunk]


class DiffusionStage(enum.Enum):
    """A part of a request's way; the values are metrics' labels."""

    QUEUE = "queue"
    """From its arrival until it gets the device; its input is prepared meanwhile."""
    RUN = "run"
    """All of its outputs."""
    WRITE = "write"
    """One output's file is written."""
    DELIVER = "deliver"
    """The file is sent or stored."""


class DiffusionStages(Stages[DiffusionStage]):
    """Durations of one request's stages; of several files together."""

    __slots__ = ()

    ability = "diffusion"
    histograms = {at: DIFFUSION_STAGE_DURATION.labels(at.value) for at in DiffusionStage}  # noqa: RUF012


class ProgressReporter:
    """Makes `Progress` of queue positions and steps, in order; writes previews in a thread.

    While a preview is being written, later steps wait, of which only the newest is reported: a step
    never comes after its successor. `close` ends it; nothing is reported after that.
    """

    def __init__(self, report: Callable[[Progress], None], threads: DaemonThreads) -> None:
        self._report = report
        self._threads = threads
        self._began: float | None = None
        self._last_step = 0.0
        self._output = 0
        self._held: tuple[Progress, Step | None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self.steps = 0
        """Steps that were run, over all outputs."""

    def waiting(self, position: int) -> None:
        self._report(Progress(queue_position=position))

    def begins(self, output: int, steps: int) -> None:
        """Note that an output is about to be made; of the first one, in about ``steps``, report it.

        Of later ones the first step is the report: one at once would hide the last step of the
        output before.
        """
        self._last_step = time.monotonic()
        self._output = output
        if self._began is None:
            self._began = self._last_step
            self._add(Progress(output=output, steps=steps), None)

    def step(self, step: Step) -> None:
        now = time.monotonic()
        self.steps += 1
        DIFFUSION_STEPS.inc()
        DIFFUSION_STEP_DURATION.observe(now - self._last_step)
        self._last_step = now
        progress = Progress(
            output=self._output,
            step=step.done,
            steps=step.of,
            elapsed_s=now - (self._began or now),
        )
        self._add(progress, step)

    def close(self) -> None:
        self._held = None
        self._report = lambda _: None

    def _add(self, progress: Progress, step: Step | None) -> None:
        if self._writing is not None:
            self._held = progress, step
        elif step is None or step.preview is None:
            self._report(progress)
        else:
            self._writing = asyncio.create_task(self._write(progress, step))

    async def _write(self, progress: Progress, step: Step) -> None:
        assert step.preview is not None  # noqa: S101 - for the type checker
        try:
            written = self._threads.submit(writing.preview, step.preview)
            preview = await asyncio.wrap_future(written)
        except Exception as error:  # noqa: BLE001 - a preview's failure must not fail the request
            log.warning("a preview can't be written", error=error)
            preview = b""
        self._report(replace(progress, preview=preview))
        self._writing = None
        held, self._held = self._held, None
        if held is not None:
            self._add(*held)


@dataclass(slots=True, eq=False)
class Deliveries:
    """The outputs of one request, delivered in order while the next one is being made.

    They go to ``output``, or to the engine's storage if the request says so. A caller that reads
    slowly holds up its own deliveries only, not the device.
    """

    engine: HostedDiffuser
    request: DiffusionRequest
    settings: DiffusionSettings
    output: DiffusionOutput
    stages: DiffusionStages
    _tasks: list[asyncio.Task[OutputFile]] = field(default_factory=list)
    _stored: list[StoredFile] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def undone_on_failure(self) -> AsyncIterator[None]:
        """Stop the deliveries and remove what was stored, if the ``with`` block raises."""
        try:
            yield
        except BaseException:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            storage = self.engine.options.storage
            if storage is not None:
                for stored in self._stored:
                    await storage.remove(stored)
            raise

    def add(self, frames: Frames) -> None:
        index = len(self._tasks)
        before = self._tasks[-1] if self._tasks else None
        self._tasks.append(asyncio.create_task(self._deliver(index, frames, before)))

    def check(self) -> None:
        """Raise the failure of a delivery that has failed, if there is one."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def all(self) -> tuple[OutputFile, ...]:
        """Wait until all outputs are delivered."""
        return tuple([await task for task in self._tasks])

    async def _deliver(
        self, index: int, frames: Frames, before: asyncio.Task[OutputFile] | None
    ) -> OutputFile:
        request, settings = self.request, self.settings
        with self.stages.timed(DiffusionStage.WRITE):
            threads = self.engine.file_threads
            data = await in_thread(threads, write_file, frames, request, settings, index)
        if before is not None:
            await asyncio.wait({before})
            before.result()
        with self.stages.timed(DiffusionStage.DELIVER):
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
            await self.output.put(chunk, len(chunk.data) + _CHUNK_OVERHEAD)
        return ""

    async def _store(self, data: bytes) -> str:
        storage = self.engine.options.storage
        assert storage is not None  # noqa: S101 - the request was checked
        extension = EXTENSIONS[self.request.format]
        stored = await storage.write(self.request.request_id, extension, data)
        self._stored.append(stored)
        return stored.url


class DiffusionWorker:
    """Serves requests on one engine, one after another on its device."""

    def __init__(
        self, engine: HostedDiffuser, requests: OpenRequests, streams: OpenWork, model: str
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._model = model
        self.work = requests.work
        self.streams = streams

    async def run(self, request: DiffusionRequest, output: DiffusionOutput) -> Finished:
        """Serve a request; cancel it to stop."""
        engine = self._engine
        with self._requests.running(request.request_id, request.trace, output) as opened:
            settings = resolve(request, engine.info, model=self._model)
            pixel_steps = settings.pixel_steps * outputs_of(request)
            self._requests.check(pixel_steps)
            opened.admit(pixel_steps)
            stages = DiffusionStages()
            reporter = ProgressReporter(output.latest, engine.preview_threads)
            deliveries = Deliveries(engine, request, settings, output, stages)
            try:
                async with deliveries.undone_on_failure():
                    with engine.queue.join(reporter.waiting) as entry:
                        with stages.timed(DiffusionStage.QUEUE):
                            tokens, image = await self._prepared(request, settings)
                            await entry.acquire()
                        with stages.timed(DiffusionStage.RUN):
                            for number, job in enumerate(jobs(request, settings, image)):
                                deliveries.check()
                                reporter.begins(number, _steps(settings))
                                deliveries.add(await engine.diffuse(job, reporter.step))
                    outputs = await deliveries.all()
            finally:
                reporter.close()
            finished = Finished(
                request_id=request.request_id,
                settings=settings,
                outputs=outputs,
                steps=reporter.steps,
                pixel_steps=pixel_steps,
                prompt_tokens=tokens,
                queued_s=stages[DiffusionStage.QUEUE],
                running_s=stages[DiffusionStage.RUN],
            )
            opened.attributes = _attributes(finished) | stages.attributes()
            return finished

    async def _prepared(
        self, request: DiffusionRequest, settings: DiffusionSettings
    ) -> tuple[int, Frames | None]:
        """Do what can be done before the device is free; return the prompt's tokens, the image."""
        engine = self._engine
        tokens = await engine.count_tokens(request.prompt)
        check_tokens("options.prompt", tokens, engine.info)
        if request.negative_prompt:
            negative = await engine.count_tokens(request.negative_prompt)
            check_tokens("options.negative_prompt", negative, engine.info)
        image = None
        if request.input_image:
            image = await engine.decode(request.input_image, settings.width, settings.height)
        return tokens, image


def _steps(settings: DiffusionSettings) -> int:
    """Return about how many steps an output takes: fewer with an input image."""
    if settings.strength is None:
        return settings.steps
    return max(1, round(settings.steps * settings.strength))


def _attributes(finished: Finished) -> dict[str, Any]:
    settings = finished.settings
    return {
        "millstream.diffusion.width": settings.width,
        "millstream.diffusion.height": settings.height,
        "millstream.diffusion.frames": max(1, settings.frames),
        "millstream.diffusion.outputs": len(finished.outputs),
        "millstream.diffusion.steps": finished.steps,
        "millstream.diffusion.pixel_steps": finished.pixel_steps,
        "gen_ai.usage.input_tokens": finished.prompt_tokens,
    }
