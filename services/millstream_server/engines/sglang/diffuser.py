"""Images and videos with SGLang's own diffusion engine, `DiffGenerator`.

SGLang's engine runs in processes of its own. It can't cancel, hides errors, and doesn't notice when
a process of its own ends; what we add is in `engines.sglang.diffusion`: a hook around each step,
which reports and stops (`child`), and processes that are watched and replaced (`scheduler`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from millstream_server.control.engine import EngineLoad, warm_up_by_probe
from millstream_server.diffusion.diffuser import (
    DiffuserInfo,
    Job,
    ModelDefaultsError,
    Step,
    check_sides,
    probe_job,
)
from millstream_server.diffusion.request import Kind
from millstream_server.engines.sglang.diffusion import facts, requests
from millstream_server.engines.sglang.diffusion.child import StepReport, Stop
from millstream_server.engines.sglang.diffusion.config import SglangDiffuserConfig
from millstream_server.engines.sglang.diffusion.facts import Geometry, PromptCounter
from millstream_server.engines.sglang.diffusion.scheduler import Scheduler
from millstream_server.media.items import Frames
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    ServingError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.telemetry.log import get_log

__all__ = ["SglangDiffuser", "SglangDiffuserConfig"]

log = get_log(__name__)

# The last step is reported before SGLang decodes the output, so it is late only if lost.
_REPORT_TIMEOUT_S = 5.0
_STEPS_OF_PATIENCE = 3.0
# On several GPUs all ranks must stop before the same step; they are at most one apart.
_STEPS_APART = 2


@dataclass(slots=True, eq=False)
class _Run:
    """The job that SGLang works on."""

    request_id: str
    on_step: Callable[[Step], None]
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """A process of SGLang's ended, or the engine was closed."""
    stepped: asyncio.Event = field(default_factory=asyncio.Event)
    """Its last step was reported."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    done: int = 0
    sign_s: float = 0.0
    """When there was the last sign of progress."""


@dataclass(frozen=True, slots=True)
class _Model:
    info: DiffuserInfo
    geometry: Geometry
    prompts: PromptCounter

    @property
    def kind(self) -> Kind:
        return next(iter(self.info.kinds))


class SglangDiffuser:
    """Satisfies `diffusion.diffuser.Diffuser`.

    When a process of SGLang's ends, the open job fails and the processes are started again; jobs
    that come meanwhile wait. After too many restarts the engine has failed.
    """

    def __init__(self, config: SglangDiffuserConfig) -> None:
        self._config = config
        self._scheduler = Scheduler(config, self._note, self._lose)
        self._client: Any = None
        self._model: _Model | None = None
        self._turn = asyncio.Lock()
        self._run: _Run | None = None
        self._numbers = itertools.count(1)
        self._signs = 0
        self._longest_s = 0.0

    async def start(self, on_failure: Callable[[ServingError], None]) -> DiffuserInfo:
        await self._scheduler.start()
        self._model = await asyncio.to_thread(self._describe)
        client: Any = importlib.import_module("sglang.multimodal_gen.runtime.scheduler_client")
        self._client = client.AsyncSchedulerClient()
        self._client.initialize(self._scheduler.generator.server_args)

        async def failed(error: EngineFailedError) -> None:
            if self._run is not None:
                await self._run.over.wait()
            on_failure(error)

        self._scheduler.supervise(failed)
        return self._model.info

    def _describe(self) -> _Model:
        config, server_args = self._config, self._scheduler.generator.server_args
        geometry = facts.read_geometry(
            config.model_path, facts.read_kind(server_args.pipeline_config)
        )
        try:
            prompts = PromptCounter(server_args.pipeline_config, config.model_path)
            info = facts.describe(config, server_args, geometry, prompts.limit)
        except ModelDefaultsError as error:
            raise EngineFailedError(f"The model could not be loaded: {error}.") from error
        except (OSError, ValueError) as error:
            log.warning("the model's files could not be read", error=error)
            message = "The model's files could not be read; the worker's log has the cause."
            raise EngineFailedError(message) from error
        return _Model(info, geometry, prompts)

    async def warm_up(self) -> None:
        """Run one step at the smallest size, and see that it is reported."""
        before = self._signs
        await warm_up_by_probe(self, self._config.warm_up_timeout_s)
        if self._signs == before:
            raise EngineFailedError(
                "SGLang's pipeline for this model doesn't denoise where the worker can follow it: "
                "its outputs could not be cancelled. Run the model with diffusers."
            )

    def count_tokens(self, prompt: str) -> int:
        return self._started().prompts.count(prompt)

    def progress(self, dp_rank: int) -> int:
        return self._signs

    async def probe(self, dp_rank: int) -> None:
        """Run one step at the smallest size, and decode it.

        A cancelled probe ends when SGLang has stopped or was killed; the next one waits for it.
        """
        await self.diffuse(probe_job(self._started().info), lambda _: None)

    async def load(self) -> EngineLoad:
        """Return whether a job runs; what waits is the caller's, and it has no blocks."""
        running = int(self._run is not None)
        return EngineLoad(running_requests=running)

    async def diffuse(self, job: Job, on_step: Callable[[Step], None]) -> Frames:
        """See `Diffuser.diffuse`.

        Raises:
            InvalidRequestError: the model can't do this.
            OverloadedError: there was too little memory for it.
            EngineFailedError: a process of SGLang's ended, or the engine was closed.
            InternalError: anything else; the log has the cause.
        """
        model = self._started()
        _check(job, model)
        async with self._turn:
            await self._scheduler.usable()
            run = _Run(f"{next(self._numbers)}-{job.request_id}", on_step)
            request = requests.make_request(
                self._scheduler.generator.server_args, job, model.kind, run.request_id
            )
            self._run, run.sign_s = run, _now()
            try:
                result = await self._forward(run, request)
            finally:
                self._run = None
                run.over.set()
        return requests.read_result(result, job, model.kind)

    async def _forward(self, run: _Run, request: Any) -> Any:
        """Let SGLang make it; a cancel returns when SGLang has stopped."""
        result = asyncio.ensure_future(self._client.forward([request]))
        lost = asyncio.ensure_future(run.lost.wait())
        try:
            await asyncio.wait({result, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise self._scheduler.fault or EngineFailedError(
                    "A process of the engine ended while it made this output."
                )
            answer = _only(result)
            if answer.error is None and run.done:
                # Not `wait_for`: Python 3.11's loses a cancel that comes with the time-out.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REPORT_TIMEOUT_S):
                        await run.stepped.wait()
        except asyncio.CancelledError:
            run.on_step = lambda _step: None
            await _to_the_end(self._stop(run, {result, lost}))
            raise
        else:
            self._sign(run)
            return answer
        finally:
            for each in (result, lost):
                each.cancel()
            await _to_the_end(asyncio.wait({result, lost}))

    async def _stop(self, run: _Run, ends: set[asyncio.Future[Any]]) -> None:
        """Stop SGLang's work; if it goes on, kill it."""
        before = run.done + _STEPS_APART if self._config.num_gpus > 1 else 0
        self._scheduler.stop(Stop(run.request_id, before))
        patience_s = max(self._config.cancel_timeout_s, _STEPS_OF_PATIENCE * self._longest_s)
        done, _ = await asyncio.wait(ends, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            log.error("SGLang did not stop; it is killed", waited_s=patience_s)
            self._scheduler.kill_now()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    def _note(self, report: StepReport) -> None:
        run = self._run
        self._signs += 1
        if run is None or run.request_id != report.request_id:
            return
        self._sign(run)
        run.done = report.done
        preview = None if report.preview is None else requests.preview_frames(report.preview)
        run.on_step(Step(report.done, report.of, preview))
        if report.done == report.of:
            run.stepped.set()

    def _sign(self, run: _Run) -> None:
        now_s = _now()
        self._longest_s = max(self._longest_s, now_s - run.sign_s)
        run.sign_s = now_s

    def _lose(self) -> None:
        """Fail the open job: a process of SGLang's ended, or the engine was closed."""
        if self._run is not None:
            self._run.lost.set()

    def _started(self) -> _Model:
        if self._scheduler.fault is not None:
            raise self._scheduler.fault
        if self._model is None:
            raise EngineFailedError("The engine has not started.")
        return self._model

    async def close(self) -> None:
        """Kill SGLang's processes; the running job fails."""
        await self._scheduler.close()
        client, self._client = self._client, None
        if client is not None:
            client.context.destroy(linger=0)


def _check(job: Job, model: _Model) -> None:
    """Refuse what a `DiffuserInfo` can't tell."""
    if job.input_image is not None:
        raise UnsupportedFeatureError.of("input_image", "this engine starts from a prompt only")
    check_sides(job, model.geometry.max_side)


def _only(result: asyncio.Future[Any]) -> Any:
    """Return the `OutputBatch` that SGLang's client has brought for one request."""
    error = result.exception()
    answer = None if error else result.result()
    answers = answer if isinstance(answer, list) else [answer]
    if error is None and len(answers) == 1:
        return answers[0]
    failure = InternalError.with_id()
    log.error("SGLang gave no result", error=error, count=len(answers), error_id=failure.error_id)
    raise failure from error


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _to_the_end(work: Awaitable[Any]) -> None:
    """Wait for it through any number of cancels."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
