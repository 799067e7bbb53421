"""How a worker serves a request: check, admit, queue, make its outputs, deliver them."""

from __future__ import annotations

from typing import Any

from millstream_server.media.frames import Frames
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.rpc.slot_session import Output
from millstream_server.synthesis.checks import check_tokens, jobs, outputs_of, resolve
from millstream_server.synthesis.output import Chunk, Finished, Progress
from millstream_server.synthesis.request import DiffusionRequest, DiffusionSettings
from millstream_server.worker.diffusion.delivery import Deliveries
from millstream_server.worker.diffusion.device_queue import QueueEntry
from millstream_server.worker.diffusion.engine import HostedDiffuser
from millstream_server.worker.diffusion.progress import ProgressReporter
from millstream_server.worker.diffusion.stages import Stage, Stages
from millstream_server.worker.open_requests import OpenRequest, OpenRequests

DiffusionOutput = Output[Progress | Chunk]


class DiffusionWorker:
    """Serves requests on one engine, one after another on its device."""

    def __init__(
        self, engine: HostedDiffuser, requests: OpenRequests, streams: OpenWork, model: str
    ) -> None:
        """Make outputs with ``engine``; requests count in ``requests``, streams in ``streams``."""
        self._engine = engine
        self._requests = requests
        self._model = model
        self.work = requests.work
        self.streams = streams

    async def run(self, request: DiffusionRequest, output: DiffusionOutput) -> Finished:
        """Serve a request; cancel it to stop.

        Raises:
            ServingError: it failed; the message is for the caller.
        """
        with self._requests.running(request.request_id, request.trace, output) as opened:
            settings, stages = self._admitted(request, opened), Stages()
            finished = await _Making(self._engine, request, settings, output, stages).finished()
            opened.attributes = _attributes(finished) | stages.attributes()
            return finished

    def _admitted(self, request: DiffusionRequest, opened: OpenRequest) -> DiffusionSettings:
        settings = resolve(request, self._engine.info, model=self._model)
        pixel_steps = settings.pixel_steps * outputs_of(request)
        self._requests.check(pixel_steps)
        opened.admit(pixel_steps)
        return settings


class _Making:
    """One admitted request."""

    def __init__(
        self,
        engine: HostedDiffuser,
        request: DiffusionRequest,
        settings: DiffusionSettings,
        output: DiffusionOutput,
        stages: Stages,
    ) -> None:
        self._engine = engine
        self._request = request
        self._settings = settings
        self._stages = stages
        self._reporter = ProgressReporter(output.latest, engine.preview_threads)
        self._deliveries = Deliveries(engine, request, settings, output, stages)

    async def finished(self) -> Finished:
        """Make and deliver all outputs."""
        try:
            async with self._deliveries.undone_on_failure():
                with self._engine.queue.join(self._reporter.waiting) as entry:
                    tokens = await self._made(entry)
                outputs = await self._deliveries.all()
        finally:
            self._reporter.close()
        settings, stages = self._settings, self._stages
        return Finished(
            request_id=self._request.request_id,
            settings=settings,
            outputs=outputs,
            steps=self._reporter.steps,
            pixel_steps=settings.pixel_steps * len(outputs),
            prompt_tokens=tokens,
            queued_s=stages[Stage.QUEUE],
            running_s=stages[Stage.RUN],
        )

    async def _made(self, entry: QueueEntry) -> int:
        """Make the outputs, in turn with other requests; return the prompt's tokens."""
        settings = self._settings
        with self._stages.timed(Stage.QUEUE):
            tokens, image = await self._prepared()
            await entry.acquire()
        steps = settings.steps
        if settings.strength is not None:
            steps = max(1, round(steps * settings.strength))
        with self._stages.timed(Stage.RUN):
            for output, job in enumerate(jobs(self._request, settings, image)):
                self._deliveries.check()
                self._reporter.begins(output, steps)
                self._deliveries.add(await self._engine.diffuse(job, self._reporter.step))
        return tokens

    async def _prepared(self) -> tuple[int, Frames | None]:
        """Do what can be done before the device is free; return the prompt's tokens."""
        request, settings, engine = self._request, self._settings, self._engine
        tokens = await engine.count_tokens(request.prompt)
        check_tokens("options.prompt", tokens, engine.info)
        if request.negative_prompt:
            negative = await engine.count_tokens(request.negative_prompt)
            check_tokens("options.negative_prompt", negative, engine.info)
        image = None
        if request.input_image:
            image = await engine.decode(request.input_image, settings.width, settings.height)
        return tokens, image


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
