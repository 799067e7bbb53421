"""What we run in SGLang's scheduler processes: a hook around every denoising step.

SGLang's diffusion engine can't cancel a request, and tells of progress at most once per percent.
The hook reports each step over a pipe, with a preview where one is wanted, and ends a request by an
exception, which SGLang returns as that request's error.

Nothing of SGLang is imported with this module: it is loaded before SGLang has chosen its platform.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PREVIEW_KEY = "millstream_preview_every_steps"
"""In `Req.extra`."""

_PACKAGE = "sglang.multimodal_gen.runtime"
_STAGES = f"{_PACKAGE}.pipelines_core.stages"
_STEP = f"{_STAGES}.denoising.DenoisingStage._run_denoising_step"
_BAR = f"{_STAGES}.base.PipelineStage.progress_bar"

_VIDEO_AXES = 5

log = logging.getLogger(__name__)


class CancelledByClientError(Exception):
    """Ends a request."""


@dataclass(frozen=True, slots=True)
class Picture:
    """RGB, 8 bits."""

    width: int
    height: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StepReport:
    """From the scheduler: a step is done."""

    request_id: str
    done: int
    of: int
    preview: Picture | None


@dataclass(frozen=True, slots=True)
class Stop:
    """To the scheduler: end a request before the step of this index, from 0, or a later one."""

    request_id: str
    before_step: int


def run(connections: Sequence[Connection], spec: Any) -> None:
    """Be the scheduler of one rank; in place of `bootstrap_scheduler_process`."""
    process: Any = importlib.import_module(f"{_PACKAGE}.utils.process")
    process.kill_itself_when_parent_died()
    # SGLang logs to stdout, which isn't ours to write to.
    os.dup2(2, 1)
    for rank, connection in enumerate(connections):
        if rank != spec.rank:
            connection.close()
    hook = StepHook(connections[spec.rank])
    plugins: Any = importlib.import_module(f"{_PACKAGE}.platforms.plugins")
    around = plugins.HookType.AROUND
    plugins.HookRegistry.register(_STEP, hook.around_step, around)
    plugins.HookRegistry.register(_BAR, _hide, around)
    for name in (f"{_PACKAGE}.managers.gpu_worker", f"{_STAGES}.base"):
        logging.getLogger(name).addFilter(_is_no_cancel)
    bootstrap: Any = importlib.import_module(f"{_PACKAGE}.managers.worker_bootstrap")
    # It warns of modules that are imported before this; they are those of `HookRegistry`.
    logging.getLogger(bootstrap.__name__).setLevel(logging.ERROR)
    bootstrap.bootstrap_scheduler_process(spec)


def _hide(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Draw no progress bars in the log."""
    return original(*args, **{**options, "disable": True})


def _is_no_cancel(record: logging.LogRecord) -> bool:
    """Drop the traceback that SGLang logs when we end a request."""
    return not (record.exc_info and isinstance(record.exc_info[1], CancelledByClientError))


class StepHook:
    """Around `DenoisingStage._run_denoising_step`."""

    def __init__(self, connection: Connection) -> None:
        """Report to, and be stopped from, the other end of ``connection``."""
        self._connection = connection
        self._stop = Stop("", 0)
        self._previews_work = True

    def around_step(
        self, original: Callable[..., None], stage: Any, ctx: Any, step: Any, *args: Any
    ) -> None:
        batch, server_args = args
        request_id = next(iter(batch.client_request_ids()), "")
        self._receive()
        stop = self._stop
        if stop.request_id == request_id and step.step_index >= stop.before_step:
            raise CancelledByClientError("cancelled by the client")
        original(stage, ctx, step, batch, server_args)
        done, every = int(step.step_index) + 1, batch.extra.get(PREVIEW_KEY, 0)
        picture = None
        if every and done % every == 0 and self._previews_work:
            picture = self._preview(stage, ctx, batch, server_args)
        report = StepReport(request_id, done, len(ctx.timesteps), picture)
        with contextlib.suppress(BrokenPipeError):  # the worker is ending
            self._connection.send(report)

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while self._connection.poll():
                self._stop = self._connection.recv()

    def _preview(self, stage: Any, ctx: Any, batch: Any, server_args: Any) -> Picture | None:
        try:
            return _decoded(stage, ctx, batch, server_args)
        except Exception:  # anything may come; the output itself must not fail with it
            log.exception("This model's latents can't be shown while it runs: no more previews.")
            self._previews_work = False
            return None


def _decoded(stage: Any, ctx: Any, batch: Any, server_args: Any) -> Picture:
    """Decode the latents of an image, or of a video's first frame, as SGLang does at the end."""
    decoding: Any = importlib.import_module(f"{_STAGES}.decoding")
    outputs: Any = importlib.import_module(f"{_PACKAGE}.entrypoints.utils")
    decoder = next(
        each for each in stage.pipeline().stages if isinstance(each, decoding.DecodingStage)
    )
    shown, latents = copy.copy(batch), ctx.latents
    if latents.dim() == _VIDEO_AXES:
        latents = latents[:, :, :1]
    shown.latents = server_args.pipeline_config.post_denoising_loop(latents, shown)
    decoded = decoder.forward(shown, server_args).output
    pixels = outputs.materialize_output_sample(decoded[0], batch.data_type, 1).frames[0]
    height, width, _ = pixels.shape
    return Picture(width, height, pixels.tobytes())
