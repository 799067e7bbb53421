"""One request on a stream: its number, its deadline, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from millstream_server.engines.base import Role
from millstream_server.generation.output import Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.runtime.errors import DeadlinePassedError, ServingError
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.worker.generation.frames import FrameBuilder


class RequestRunner(Protocol):
    """What runs a stream's requests.

    `worker.generation.core.GenerationWorker`, or a Processor's
    `processor.diffusion.text.TextForwarder`.
    """

    role: Role
    work: OpenWork
    """Counts open requests; knows whether the worker drains."""
    streams: OpenWork
    """Counts streams; a drain waits until those notified of it have ended."""

    def context_length_of(self, model: str) -> int:
        """Return the most tokens of prompt and completion together; a worker has one model.

        Raises:
            ServingError: the model isn't served here.
        """
        ...

    def submit(self, request: GenerationRequest, sink: OutputSink) -> str:
        """Check and start a request; return the id for `cancel`.

        Raises:
            ServingError: it was refused.
        """
        ...

    def cancel(self, engine_id: str) -> None:
        """Stop a request at any stage."""
        ...


class Slot:
    """A slot in use, from the start to the terminal entry in a frame; the engine's sink."""

    __slots__ = (
        "_deadline",
        "_deadline_passed",
        "_engine_id",
        "_frames",
        "_number",
        "_release",
        "_runner",
        "emit",
    )

    def __init__(
        self,
        number: int,
        runner: RequestRunner,
        frames: FrameBuilder,
        release: Callable[[int], None],
    ) -> None:
        """Write to ``frames``; ``release`` is called when slot ``number`` is free again."""
        self._number = number
        self._runner = runner
        self._frames = frames
        self._release = release
        self._engine_id = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_passed = False
        self.emit = partial(frames.emit, number)  # token path: a single Python call

    def start(self, request: GenerationRequest) -> None:
        """Run the request.

        Raises:
            ServingError: it was refused; the slot stays in use.
        """
        left_s = request.time_left_s
        if left_s is not None:
            if left_s <= 0:
                message = "the deadline passed before the request reached the worker"
                raise DeadlinePassedError(message)
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(left_s, self._on_deadline)
        self._engine_id = self._runner.submit(request, self)

    def cancel(self) -> None:
        """Stop the request; its end is reported as usual."""
        self._runner.cancel(self._engine_id)

    def abandon(self) -> None:
        """Stop the request of a stream that has ended."""
        self._free()
        self.cancel()

    def finish(self, finish: Finish) -> None:
        """Report the engine's finish."""
        if self._deadline_passed and finish.reason is FinishReason.CANCELLED:
            self.fail(DeadlinePassedError("the deadline passed; what was generated was sent"))
            return
        self._free()
        self._frames.finish(self._number, finish)

    def fail(self, error: ServingError) -> None:
        """Report a failure, the engine's or the worker's."""
        self._free()
        self._frames.fail(self._number, error)

    def _on_deadline(self) -> None:
        self._deadline_passed = True
        self.cancel()

    def _free(self) -> None:
        self._release(self._number)
        if self._deadline is not None:
            self._deadline.cancel()
