"""A choice's legs: one request on one worker each, and its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from millstream_server.generation.logprobs import LogprobColumns, logprob_bytes, output_bytes
from millstream_server.generation.output import Finish, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.span import NO_SPAN, RequestSpan
from millstream_server.runtime.errors import ServingError


class Running(Protocol):
    """A request on a worker (`links.slot_stream.OpenRequest`)."""

    def cancel(self) -> None:
        """Stop it, at any time, also twice and after the end."""
        ...


class Workers(Protocol):
    """Runs requests on workers (`links.fleet.Fleet`)."""

    def generate(self, address: str, request: GenerationRequest, sink: OutputSink) -> Running:
        """Start a request on a worker.

        Raises:
            WorkerLostError: the worker isn't connected.
        """
        ...


class LegEvents(Protocol):
    """Receives a leg's events (`processor.generation.Generation`)."""

    def progressed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Called when these tokens have arrived."""

    def leg_ended(self, leg: Leg) -> None:
        """Called when the leg has a `result` or an `error`."""


class _Nobody:
    """The `LegEvents` of a leg that is over."""

    def progressed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        pass

    def leg_ended(self, leg: Leg) -> None:
        pass


_NOBODY = _Nobody()


class Leg:
    """One worker's part of a choice: receives and keeps the worker's output.

    When it is over, it forgets whom it reports to and its worker's request, which both know it:
    else all that the request holds would stay until the next garbage collection.
    """

    __slots__ = (
        "_cancel",
        "_progressed",
        "error",
        "events",
        "logprobs",
        "result",
        "span",
        "token_ids",
    )

    def __init__(self, events: LegEvents) -> None:
        """Report to ``events``; nothing is started yet."""
        self.events = events
        self._progressed = events.progressed
        self._cancel: Callable[[], None] | None = None
        self.span: RequestSpan = NO_SPAN
        self.token_ids: list[int] = []
        """Tokens received and not yet read."""
        self.logprobs: LogprobColumns | None = None
        """Of the first tokens of ``token_ids``; None: of none."""
        self.result: Finish | None = None
        self.error: ServingError | None = None

    def start(
        self, workers: Workers, address: str, request: GenerationRequest, span: RequestSpan
    ) -> None:
        """Run the request on a worker, as a child of ``span``.

        Raises:
            WorkerLostError: the worker isn't connected.
        """
        self.span = span
        trace = span.carry(request.trace)
        if trace is not request.trace:
            request = replace(request, trace=trace)
        try:
            self._cancel = workers.generate(address, request, self).cancel
        except ServingError as error:
            span.failed(error)
            raise

    def cancel(self) -> None:
        """Cancel at the worker; may be called at any time."""
        if self._cancel is not None:
            self._cancel()

    @property
    def over(self) -> bool:
        """Whether the leg has ended, successfully or not."""
        return self.result is not None or self.error is not None

    # Called once per frame entry: the token path.
    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Keep new tokens."""
        self.token_ids += token_ids
        if logprobs:
            self._keep(logprobs)
        self._progressed(token_ids, logprobs)

    def _keep(self, logprobs: Sequence[TokenLogprob]) -> None:
        if self.logprobs is not None:
            self.logprobs.extend(logprobs)
        elif isinstance(logprobs, LogprobColumns):
            self.logprobs = logprobs
        else:
            self.logprobs = LogprobColumns(logprobs)

    @property
    def held_bytes(self) -> int:
        """About what its output takes that was not read yet."""
        logprobs = self.logprobs
        prompt = self.result.prompt_logprobs if self.result else ()
        return output_bytes(self.token_ids, logprobs or ()) + logprob_bytes(prompt)

    def drop(self) -> None:
        """Drop what was not read yet."""
        self.token_ids, self.logprobs = [], None
        if self.result is not None and self.result.prompt_logprobs:
            self.result = replace(self.result, prompt_logprobs=())

    # The span comes last: if telemetry fails, the end has been reported.
    def finish(self, finish: Finish) -> None:
        """Keep the worker's terminal report."""
        self.result = finish
        self._ended()
        self.span.finished(finish)

    def fail(self, error: ServingError) -> None:
        """Keep the worker's failure."""
        self.error = error
        self._ended()
        self.span.failed(error)

    def _ended(self) -> None:
        events, self.events = self.events, _NOBODY
        self._progressed = _NOBODY.progressed
        self._cancel = None
        events.leg_ended(self)
