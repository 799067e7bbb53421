"""One request's progress, as its stream gets it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from millstream_server.media import writing
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import (
    DIFFUSION_STEP_DURATION,
    DIFFUSION_STEPS,
)
from millstream_server.runtime.threads import DaemonThreads
from millstream_server.synthesis.diffuser import Step
from millstream_server.synthesis.output import Progress

log = get_log(__name__)


class ProgressReporter:
    """Makes `Progress` of queue positions and steps, in order; writes previews in a thread.

    While a preview is being written, later steps wait, of which only the newest is reported: a step
    never comes after its successor. `close` ends it; nothing is reported after that.
    """

    def __init__(self, report: Callable[[Progress], None], threads: DaemonThreads) -> None:
        """Call ``report`` on the event loop; ``threads`` write previews."""
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
        """Report a position in the queue."""
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
        """Report that a step is done."""
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
        """Report nothing more."""
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
        self._report(_with_preview(progress, preview))
        self._writing = None
        held, self._held = self._held, None
        if held is not None:
            self._add(*held)


def _with_preview(progress: Progress, preview: bytes) -> Progress:
    return Progress(
        output=progress.output,
        step=progress.step,
        steps=progress.steps,
        elapsed_s=progress.elapsed_s,
        preview=preview,
    )
