"""Images and videos: checked here, made by the workers of their model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

from millstream_server.processor.forwarding.fit import Fit
from millstream_server.processor.forwarding.promised import PromisedFiles
from millstream_server.processor.front import Front, FrontRequest, Running
from millstream_server.synthesis.checks import outputs_of, resolve
from millstream_server.synthesis.diffuser import TASK_OF_KIND, DiffuserInfo
from millstream_server.synthesis.output import Chunk, Finished, Progress
from millstream_server.synthesis.request import DiffusionRequest, Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from millstream_server.engines.base import EngineInfo
    from millstream_server.runtime.rpc.slot_session import Output


class Making(Running, Protocol):
    """A request for images or a video on its way to a worker and back."""

    def entries(self) -> AsyncIterator[tuple[Progress | Chunk, bool]]:
        """Yield what comes, and whether only the latest is of interest."""
        ...

    @property
    def end(self) -> Finished:
        """The good end, after `entries`."""
        ...


class Workers(Protocol):
    """Runs requests on workers (`links.fleet.Fleet`)."""

    def diffuse(self, address: str, request: DiffusionRequest) -> Making:
        """Start a request.

        Raises:
            WorkerLostError: the worker accepts no such requests now.
        """
        ...


class DiffusionCore:
    """Forwards requests for images and videos; one per process."""

    def __init__(self, front: Front, workers: Workers) -> None:
        """Run requests on ``workers``."""
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
            asked.hold(_nbytes(request))
            engines = asked.find(request.model)
            request, fit = _checked(request, asked.model, engines)
            await asked.admit(
                request.priority, tell=lambda at: output.latest(Progress(queue_position=at))
            )
            address, engine = asked.pick(fit, request.priority)
            request = _filled(request, _diffuser(engine), asked.model)
            promised = PromisedFiles(
                outputs_of(request), _pixels(request), address, to_url=request.to_url
            )
            sent = replace(request, trace=asked.leg(address))
            making = asked.follow(self._workers.diffuse(address, sent))
            async for entry, _ in making.entries():
                if isinstance(entry, Progress):
                    promised.check_progress(entry)
                    output.latest(entry)
                else:
                    promised.check(entry)
                    await output.put(entry, len(entry.data))
            promised.check_all(making.end)
            asked.end(input_tokens=making.end.prompt_tokens)
            return replace(making.end, request_id=request.request_id)


def _nbytes(request: DiffusionRequest) -> int:
    return len(request.input_image) + len(request.prompt) + len(request.negative_prompt)


def _pixels(request: DiffusionRequest) -> int:
    """Return the pixels of one output; its settings are filled in."""
    return (request.width or 0) * (request.height or 0) * (request.frames or 1)


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
