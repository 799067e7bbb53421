"""Images and videos: checked here, made by the workers of their model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from millstream_server.processor.forwarding.fit import Fit
from millstream_server.processor.forwarding.promised import PromisedFiles
from millstream_server.routing.tasks import TASK_OF_KIND
from millstream_server.runtime.errors import InternalError
from millstream_server.synthesis.checks import outputs_of, resolve
from millstream_server.synthesis.diffuser import DiffuserInfo
from millstream_server.synthesis.output import Chunk, Finished, Progress
from millstream_server.synthesis.request import DiffusionRequest, Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from millstream_server.engines.base import EngineInfo
    from millstream_server.processor.forwarding.forwarder import Forwarder
    from millstream_server.runtime.rpc.slot_session import Output


class Making(Protocol):
    """A request on its way to a worker and back (`links.entry_stream.SlotCall`)."""

    def entries(self) -> AsyncIterator[tuple[Progress | Chunk, bool]]:
        """Yield what comes, and whether only the latest is of interest."""
        ...

    @property
    def end(self) -> Finished:
        """The good end, after `entries`."""
        ...

    def cancel(self) -> None:
        """Stop it, at any time, also after its end."""
        ...

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the worker has ended it."""
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

    def __init__(self, forwarder: Forwarder, workers: Workers) -> None:
        """Run requests on ``workers``."""
        self._forwarder = forwarder
        self._workers = workers

    async def run(self, request: DiffusionRequest, output: Output[Progress | Chunk]) -> Finished:
        """Run a request; progress, queue positions and files go to ``output``.

        Raises:
            ServingError: it failed.
        """
        task = TASK_OF_KIND[request.kind]
        with self._forwarder.request(task, request, _nbytes(request)) as forwarded:
            request, fit = _checked(request, forwarded.name, forwarded.engines())
            await forwarded.admit(tell=lambda at: output.latest(Progress(queue_position=at)))
            address, engine = forwarded.pick(fit)
            request = _filled(request, _diffuser(engine), forwarded.name)
            promised = PromisedFiles(
                outputs_of(request), _pixels(request), address, to_url=request.to_url
            )
            trace = forwarded.leg(address)
            making = self._workers.diffuse(address, replace(request, trace=trace))
            making.when_ended(forwarded.released)
            try:
                async for entry, _ in making.entries():
                    if isinstance(entry, Progress):
                        promised.check_progress(entry)
                        output.latest(entry)
                    else:
                        promised.check(entry)
                        await output.put(entry, len(entry.data))
                promised.check_all(making.end)
            except BaseException as error:
                making.cancel()
                forwarded.ended(error)
                raise
            forwarded.ended()
            forwarded.used(making.end.prompt_tokens)
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
    if not isinstance(engine, DiffuserInfo):
        raise InternalError.with_id()
    return engine
