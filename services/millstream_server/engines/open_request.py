"""A request on its way through a vendor's engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from millstream_server.generation.output import Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.runtime.errors import ServingError, WorkerPausedError

_PAUSED_S = 1.0
"""After this time a client may retry what a pause has ended."""


@dataclass(slots=True, eq=False, kw_only=True)
class OpenRequest:
    """One request and how it ends; each engine adds what it needs."""

    request: GenerationRequest
    sink: OutputSink
    task: asyncio.Task[None] | None = None
    aborted: bool = False
    failed_by_us: ServingError | None = None
    """Why we have aborted it, if the caller didn't ask for that."""
    over: bool = False
    timer: asyncio.TimerHandle | None = None
    """Ends a hand-off that takes too long."""

    def pause_out(self) -> None:
        """Say that a pause ends it."""
        self.failed_by_us = WorkerPausedError(
            "An operator paused this worker.", retry_delay_s=_PAUSED_S
        )

    def end(self, result: Finish | ServingError) -> None:
        """Report the end, unless it was reported."""
        if self.over:
            return
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
        if isinstance(result, ServingError):
            self.sink.fail(result)
        elif result.reason is FinishReason.CANCELLED and self.failed_by_us is not None:
            self.sink.fail(self.failed_by_us)
        else:
            self.sink.finish(result)
