"""Images and videos: checked here, made by the workers of their model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from millstream_server.control.engine import Task
from millstream_server.diffusion.checks import outputs_of, resolve
from millstream_server.diffusion.diffuser import TASK_OF_KIND, DiffuserInfo, ImageDefaults
from millstream_server.diffusion.request import Chunk, DiffusionRequest, Finished, Kind, Progress
from millstream_server.links.unread import not_asked_for
from millstream_server.processor.front import Fit, Front, FrontRequest
from millstream_server.processor.losses import run_on_a_worker

if TYPE_CHECKING:
    from millstream_server.control.engine import EngineInfo
    from millstream_server.links.fleet import Fleet
    from millstream_server.runtime.rpc.slot_session import Output


_PIXEL_BYTES = 4
_EXTRA_BYTES = 16 << 20
"""Of a file besides its pixels; the prompt is in it."""
_PREVIEW_BYTES = 1 << 20
"""Workers' have 512 x 512 pixels at most."""
_TEXT_CHARS = 4096
"""Most characters of a URL and of the names that a worker chooses."""


class DiffusionCore:
    """Forwards requests for images and videos; one per process."""

    def __init__(self, front: Front, workers: Fleet) -> None:
        self._front = front
        self._workers = workers

    async def run(self, request: DiffusionRequest, output: Output[Progress | Chunk]) -> Finished:
        """Run a request; progress, queue positions and files go to ``output``.

        Raises:
            ServingError: it failed.
        """
        with FrontRequest(
            self._front,
            TASK_OF_KIND[request.kind],
            request.trace,
            request_id=request.request_id,
            deadline_s=request.deadline_s,
        ) as asked:
            asked.hold(
                len(request.input_image) + len(request.prompt) + len(request.negative_prompt)
            )
            engines = await asked.find(request.model)
            request, fit = _checked(request, asked.model, engines)
            await asked.admit(
                request.priority, tell=lambda at: output.latest(Progress(queue_position=at))
            )
            end = await run_on_a_worker(
                asked,
                fit,
                request,
                lambda address, engine: self._made(request, address, engine, asked, output),
            )
            asked.end(input_tokens=end.prompt_tokens)
            return replace(end, request_id=request.request_id)

    def defaults(self, model: str) -> ImageDefaults:
        """Return the defaults of a worker that can make images.

        Raises:
            ServingError: there is none.
        """
        name = self._front.models.name_of(model, Task.GENERATE_IMAGE)
        info = _diffuser(self._front.router.task_workers(name).engines(Task.GENERATE_IMAGE)[0])
        return ImageDefaults(info.default_width, info.default_height, info.default_steps)

    async def _made(
        self,
        request: DiffusionRequest,
        address: str,
        engine: EngineInfo,
        asked: FrontRequest,
        output: Output[Progress | Chunk],
    ) -> Finished:
        """Make it on one worker."""
        request = _filled(request, _diffuser(engine), asked.model)
        pixels = (request.width or 0) * (request.height or 0) * (request.frames or 1)
        promised = PromisedFiles(outputs_of(request), pixels, address, to_url=request.to_url)
        sent = replace(request, trace=asked.leg(address))
        making = asked.follow(self._workers.diffuse(address, sent))
        async for entry, _ in making.entries():
            if isinstance(entry, Progress):
                promised.check_progress(entry)
                output.latest(entry)
            else:
                promised.check(entry)
                asked.given = True
                await output.put(entry, len(entry.data))
        promised.check_all(making.end)
        return making.end


def _checked(
    request: DiffusionRequest, model: str, engines: list[EngineInfo]
) -> tuple[DiffusionRequest, Fit]:
    """Check a request against the workers' limits; return it with a seed.

    Raises:
        InvalidRequestError: none of them can take it.
    """
    fit = Fit(lambda engine: resolve(request, _diffuser(engine), model=model))
    fit.require(engines)
    able = next(engine for engine in engines if fit(engine))
    seed = resolve(request, _diffuser(able), model=model).seed
    return replace(request, seed=seed, model=model), fit


def _filled(request: DiffusionRequest, info: DiffuserInfo, model: str) -> DiffusionRequest:
    """Fill in the defaults of the worker that runs the request."""
    settings = resolve(request, info, model=model)
    is_video = request.kind is Kind.VIDEO
    return replace(
        request,
        n=outputs_of(request),
        width=settings.width,
        height=settings.height,
        steps=settings.steps,
        guidance_scale=settings.guidance_scale,
        scheduler=settings.scheduler,
        strength=settings.strength,
        frames=settings.frames if is_video else None,
        fps=settings.fps if is_video else None,
    )


def _diffuser(engine: EngineInfo) -> DiffuserInfo:
    return cast("DiffuserInfo", engine)  # whose task it is


# ---- has a worker sent what was asked of it? A client must not get a part as the whole ----------


class PromisedFiles:
    """The files of one request."""

    def __init__(self, outputs: int, pixels: int, worker: str, *, to_url: bool) -> None:
        self._outputs = outputs
        self._most_bytes = _PIXEL_BYTES * pixels + _EXTRA_BYTES
        self._worker = worker
        self._to_url = to_url
        self._bytes: Counter[int] = Counter()

    def check(self, chunk: Chunk) -> None:
        """Check a piece of one.

        Raises:
            WorkerLostError: it isn't one that was asked for.
        """
        if self._to_url or chunk.output >= self._outputs:
            raise not_asked_for(self._worker, f"a chunk of output {chunk.output}")
        self._bytes[chunk.output] += len(chunk.data)
        if self._bytes[chunk.output] > self._most_bytes:
            what = f"more than {self._most_bytes} bytes of output {chunk.output}"
            raise not_asked_for(self._worker, what)

    def check_progress(self, progress: Progress) -> None:
        """Check the size of a preview.

        Raises:
            WorkerLostError: it is no small image.
        """
        if len(progress.preview) > _PREVIEW_BYTES:
            what = f"a preview of {len(progress.preview)} bytes"
            raise not_asked_for(self._worker, what)

    def check_all(self, end: Finished) -> None:
        """Check that nothing is missing at the end.

        Raises:
            WorkerLostError: something is.
        """
        sizes = [file.total_bytes for file in end.outputs]
        sent = [self._bytes[output] for output in range(self._outputs)]
        if len(sizes) != self._outputs or not (self._to_url or sizes == sent):
            what = f"{sent} bytes of {sizes[:8]}, of {self._outputs} outputs"
            raise not_asked_for(self._worker, what)
        longest = max(len(text) for text in (end.settings.scheduler, *(f.url for f in end.outputs)))
        if longest > _TEXT_CHARS:
            raise not_asked_for(self._worker, f"a URL or a name of {longest} characters")
