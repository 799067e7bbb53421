"""Images and videos with a pipeline of diffusers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Callable

from millstream_server.control.engine import EngineLoad, warm_up_by_probe
from millstream_server.diffusion.diffuser import (
    DiffuserInfo,
    Job,
    ModelDefaultsError,
    Step,
    too_little_memory,
)
from millstream_server.engines.diffusers.adapter import DiffusersConfig
from millstream_server.engines.diffusers.pipeline import LoadedPipeline, StoppedError, smallest
from millstream_server.media.items import Frames
from millstream_server.runtime.errors import EngineFailedError, InternalError, ServingError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.threads import DaemonThreads

log = get_log(__name__)

_CLOSE_TIMEOUT_S = 10.0
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
_CPU_OUT_OF_MEMORY = "can't allocate memory"


class DiffusersEngine:
    """Satisfies `diffusion.diffuser.Diffuser`.

    One thread loads and runs the pipeline; the event loop stays free.
    """

    def __init__(self, config: DiffusersConfig) -> None:
        self._config = config
        self._thread = DaemonThreads(1, "diffusers")
        self._pipeline: LoadedPipeline | None = None
        self._on_failure: Callable[[ServingError], None] | None = None
        self._fault: EngineFailedError | None = None
        self._stop = threading.Event()
        self._probe: asyncio.Future[Frames] | None = None
        self._steps = 0
        self._running = False
        self._closed = False

    async def start(self, on_failure: Callable[[ServingError], None]) -> DiffuserInfo:
        self._on_failure = on_failure
        self._pipeline = await asyncio.wrap_future(self._thread.submit(self._load))
        return self._pipeline.info

    def _load(self) -> LoadedPipeline:
        try:
            return LoadedPipeline(self._config)
        except EngineFailedError:
            raise
        except ModelDefaultsError as error:
            raise EngineFailedError(f"The pipeline could not be loaded: {error}.") from error
        except Exception as error:  # the vendor's seam: anything may come
            log.warning("the pipeline could not be loaded", error=error)
            message = "The pipeline could not be loaded; the worker's log has the cause."
            raise EngineFailedError(message) from error

    async def warm_up(self) -> None:
        await warm_up_by_probe(self, self._config.warm_up_timeout_s)

    def progress(self, dp_rank: int) -> int:
        return self._steps

    async def probe(self, dp_rank: int) -> None:
        """Run one step at the smallest size, and decode it.

        A cancelled probe may go on in the thread of an engine that hangs; the next one waits for
        it.
        """
        if self._probe is not None and not self._probe.done():
            await asyncio.wait({self._probe})
        pipeline, stop = self._started(), threading.Event()
        self._probe = self._submit(smallest(pipeline.info), lambda _: None, stop)
        self._probe.add_done_callback(self._ended)
        try:
            await asyncio.shield(self._probe)
        except asyncio.CancelledError:
            stop.set()
            raise

    async def load(self) -> EngineLoad:
        """Return whether a job runs; what waits is the caller's, and it has no blocks."""
        return EngineLoad(running_requests=int(self._running))

    def count_tokens(self, prompt: str) -> int:
        return self._started().count_tokens(prompt)

    async def diffuse(self, job: Job, on_step: Callable[[Step], None]) -> Frames:
        """See `Diffuser.diffuse`.

        Raises:
            InvalidRequestError: the model can't do this, such as a negative prompt without
                guidance.
            OverloadedError: there is too little memory for it now.
            EngineFailedError: the device failed, or the engine was closed.
            InternalError: anything else; the log has the cause.
        """
        loop, stop = asyncio.get_running_loop(), threading.Event()

        def report(step: Step) -> None:
            loop.call_soon_threadsafe(on_step, step)

        made = self._submit(job, report, stop)
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            stop.set()
            await _settled(made)
            raise
        finally:
            self._ended(made)

    def _submit(
        self, job: Job, report: Callable[[Step], None], stop: threading.Event
    ) -> asyncio.Future[Frames]:
        pipeline = self._started()
        try:
            return asyncio.wrap_future(self._thread.submit(self._run, pipeline, job, report, stop))
        except RuntimeError as error:  # closed meanwhile
            raise EngineFailedError("The engine was closed.") from error

    def _run(
        self,
        pipeline: LoadedPipeline,
        job: Job,
        report: Callable[[Step], None],
        stop: threading.Event,
    ) -> Frames:

        def count(step: Step) -> None:
            self._steps += 1
            report(step)

        self._stop, self._running = stop, True
        try:
            self._started()
            return pipeline.run(job, count, stop)
        except StoppedError as error:
            raise EngineFailedError("The engine was closed.") from error
        except ServingError:
            raise
        except Exception as error:  # the vendor's seam: anything may come
            failure = self._translated(pipeline, job, error)
            # The frames of the traceback hold tensors.
            traceback.clear_frames(error.__traceback__)
            pipeline.free_memory()
            raise failure from error
        finally:
            self._running = False

    def _translated(self, pipeline: LoadedPipeline, job: Job, error: Exception) -> ServingError:
        if not pipeline.device_works():
            log.error("the device failed", error=error)
            self._fault = EngineFailedError("The worker's GPU failed.")
            return self._fault
        if type(error).__name__ in _OUT_OF_MEMORY or _CPU_OUT_OF_MEMORY in str(error):
            log.warning("too little memory for a job", width=job.width, height=job.height)
            return too_little_memory(job)
        failure = InternalError.with_id()
        log.error("the pipeline failed", error=error, error_id=failure.error_id)
        return failure

    def _ended(self, made: asyncio.Future[Frames]) -> None:
        """Tell of a device that failed, once, whoever waits for the job."""
        if not made.cancelled():
            made.exception()  # it may be that nobody else reads it
        if self._fault is not None and self._on_failure is not None:
            on_failure, self._on_failure = self._on_failure, None
            on_failure(self._fault)

    def _started(self) -> LoadedPipeline:
        if self._closed:
            raise EngineFailedError("The engine was closed.")
        if self._pipeline is None:
            raise EngineFailedError("The engine has not started.")
        return self._pipeline

    async def close(self) -> None:
        """Stop the running job, which fails, and release the pipeline."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        released = asyncio.wrap_future(self._thread.submit(self._release))
        self._thread.close()
        await asyncio.wait({released}, timeout=_CLOSE_TIMEOUT_S)
        if not released.done():
            log.warning("the pipeline hangs; it is left to the process's end")

    def _release(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.free_memory()


async def _settled(made: asyncio.Future[Frames]) -> None:
    """Wait until it is done, through any number of cancels."""
    while not made.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({made})
