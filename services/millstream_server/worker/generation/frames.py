"""Builds a stream's next step frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from millstream_server.generation.logprobs import logprob_bytes, output_bytes
from millstream_server.generation.output import Finish, TokenLogprob
from millstream_server.generation.stream_metrics import StreamMetrics
from millstream_server.runtime.errors import ServingError
from millstream_server.worker.generation.frame_content import FrameContent

_MAX_ENDS = 1024
"""While more ends are waiting to be sent, no further control of the caller is obeyed."""


class FrameBuilder:
    """Collects what slots report; `take` returns it as a response and starts the next frame.

    Everything reported in one iteration of the event loop is in one frame. Tokens collect while a
    write is in progress: a slow reader gets fewer, larger frames, of a bounded size each.
    """

    __slots__ = (
        "_counts",
        "_draining",
        "_errors",
        "_finishes",
        "_logprobs",
        "_metrics",
        "_response_type",
        "_sequence",
        "_slots",
        "_taken",
        "_token_ids",
        "filled",
        "wake",
    )

    def __init__(self, response_type: Callable[[], Any], metrics: StreamMetrics) -> None:
        """Make responses of ``response_type``, a message with a field `frame`."""
        self._response_type = response_type
        self._metrics = metrics
        self._sequence = 0
        self.wake = asyncio.Event()
        """Set when the frame has content."""
        self._taken = asyncio.Event()
        self._begin()

    def _begin(self) -> None:
        self.filled = False
        """Whether the frame has content."""
        self._draining = False
        self._slots: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: list[tuple[int, Sequence[TokenLogprob]]] = []
        """With the index of their entry."""
        self._finishes: list[tuple[int, Finish]] = []
        self._errors: list[tuple[int, ServingError]] = []

    def _fill(self) -> None:
        self.filled = True
        self.wake.set()

    # The token path: one call per request and engine step.
    def emit(
        self, slot: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """Add a slot's new tokens."""
        if not self.filled:
            self._fill()
        self._slots.append(slot)
        self._counts.append(len(token_ids))
        self._token_ids += token_ids
        if logprobs:
            self._logprobs.append((len(self._slots) - 1, logprobs))

    def finish(self, slot: int, finish: Finish) -> None:
        """Add a slot's finish."""
        self._fill()
        self._finishes.append((slot, finish))

    def fail(self, slot: int, error: ServingError) -> None:
        """Add a slot's failure."""
        self._fill()
        self._errors.append((slot, error))

    def drain(self) -> None:
        """Mark in the frame that the worker is shutting down."""
        self._fill()
        self._draining = True

    async def short(self) -> None:
        """Wait until so few ends are waiting to be sent that further controls may be obeyed."""
        while len(self._finishes) + len(self._errors) > _MAX_ENDS:
            self._taken.clear()
            await self._taken.wait()

    @property
    def held_bytes(self) -> int:
        """About what waits to be sent."""
        return (
            output_bytes(self._token_ids, ())
            + sum(logprob_bytes(found) for _, found in self._logprobs)
            + sum(logprob_bytes(finish.prompt_logprobs) for _, finish in self._finishes)
        )

    def take(self) -> Any:
        """Return the response, and start the next frame with what had no room in it."""
        response = self._response_type()
        self._sequence += 1
        response.frame.sequence = self._sequence
        if self._draining:
            response.frame.draining = True
        content = FrameContent(
            slots=self._slots,
            counts=self._counts,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            finishes=self._finishes,
            errors=self._errors,
        )
        rest = content.split()
        content.write(response.frame)
        self._metrics.frame(len(content.token_ids))
        self._begin()
        if rest is not None:
            self._resume(rest)
        self._taken.set()
        return response

    def _resume(self, rest: FrameContent) -> None:
        self._slots, self._counts, self._token_ids = rest.slots, rest.counts, rest.token_ids
        self._logprobs, self._finishes, self._errors = rest.logprobs, rest.finishes, rest.errors
        self._fill()
