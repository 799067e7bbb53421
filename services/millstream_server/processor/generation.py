"""One prompt on its way: routed, started on its workers, gathered, given out as paced deltas.

A `Generation` has one `_Choice` per answer; a choice has one leg (an aggregated worker) or two (a
prefill and a decode worker, started at the same time with one ticket). Workers push into the
choices; `deltas` wakes when the pacer says so and turns what has gathered into text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import grpc

from millstream_server.engines.base import (
    Finish,
    FinishReason,
    LogprobOptions,
    OutputSink,
    Sampling,
    TokenLogprob,
)
from millstream_server.processor.text.output import ChoiceText
from millstream_server.processor.turn_telemetry import ABANDONED, UNTOLD, TurnTelemetry
from millstream_server.runtime.errors import ServingError, UnavailableError
from millstream_server.runtime.places import Priority
from millstream_server.worker_stream.request_span import UNTRACED, RequestSpan
from millstream_server.worker_stream.start import NOT_TRACED, GenerationStart, TraceContext

if TYPE_CHECKING:
    from millstream_server.processor.pacing import Pacer
    from millstream_server.processor.text.tokenizer import TextModel
    from millstream_server.routing.pool import Route
    from millstream_server.transfer.ticket import Ticket, TicketKey
    from millstream_server.worker_stream.client import WorkerConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A checked request, ready to run."""

    request_id: str
    model: str
    token_ids: Sequence[int]
    sampling: Sampling
    stops: tuple[str, ...] = ()
    n: int = 1
    logprobs: LogprobOptions | None = None
    min_interval_s: float = 0.0
    return_token_ids: bool = False
    include_special_tokens: bool = False
    continuation: bool = False
    """The answer goes on with the prompt's text (Complete), so its leading space counts."""
    priority: Priority | None = Priority.NORMAL
    """None: one this version doesn't know, which is refused."""
    timeout_s: float | None = None
    trace: TraceContext = NOT_TRACED
    """What the request came with."""
    telemetry: TurnTelemetry = UNTOLD


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a generation, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one choice grew by; ``finish_reason`` is set in its last."""

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    """The stop string, or the id of the EOS or stop token."""


@dataclass(slots=True)
class _Choice:
    """One answer in the making; the sink of its decode leg."""

    generation: Generation
    index: int
    text: ChoiceText
    cancel_legs: list[Callable[[], None]] = field(default_factory=list)
    fresh_ids: list[int] = field(default_factory=list)
    fresh_logprobs: list[TokenLogprob] = field(default_factory=list)
    worker_finish: Finish | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    awaits_prefill: bool = False
    """The prefill leg still has the prompt's logprobs; nothing is given out without them."""
    leg: RequestSpan = UNTRACED
    ended: bool = False
    finish_reason: FinishReason | None = None
    all_text: list[str] = field(default_factory=list)

    # Called once per frame entry: the token path.
    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        self.fresh_ids += token_ids
        if logprobs:
            self.fresh_logprobs += logprobs
        self.generation.paced.touch()

    # What is told of it comes last: should that fail, nobody waits for an end that never comes.
    def finish(self, finish: Finish) -> None:
        self.worker_finish = finish
        self.prompt_logprobs = finish.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, finish.cached_tokens)
        self.generation.paced.urge()
        self.generation.worked()
        self.leg.finished(finish)

    def fail(self, error: ServingError) -> None:
        self.lose(error)
        self.generation.worked()
        self.leg.failed(error)

    def lose(self, error: ServingError) -> None:
        """One of the legs failed."""
        if not self.ended and (self.worker_finish is None or self.awaits_prefill):
            self.generation.fail(error)

    def cancel(self) -> None:
        for cancel in self.cancel_legs:
            cancel()

    def take(self) -> Delta | None:
        """Turn what has gathered into a delta; None when there is nothing new."""
        finish = self.worker_finish
        if self.ended or self.awaits_prefill or not (self.fresh_ids or finish):
            return None
        ids, self.fresh_ids = self.fresh_ids, []
        logprobs, self.fresh_logprobs = self.fresh_logprobs, []
        pushed, consumed = self._push(ids, finish)
        self.completion_tokens += consumed
        matched: str | int | None = self.text.matched
        reason: FinishReason | None = None
        if matched is not None:
            reason = FinishReason.STOP
            self.cancel()  # the worker may be ahead of the stop string
        elif finish is not None:
            pushed += self.text.finish()
            reason, matched = finish.reason, finish.matched_token_id
            if self.text.matched is not None:  # completed by the very last, incomplete character
                reason, matched = FinishReason.STOP, self.text.matched
        self.ended = reason is not None
        self.finish_reason = reason
        self.all_text.append(pushed)
        return Delta(
            index=self.index,
            text=pushed,
            token_ids=ids[:consumed],
            logprobs=logprobs[:consumed],
            finish_reason=reason,
            matched_stop=matched if reason is FinishReason.STOP else None,
        )

    def _push(self, ids: list[int], finish: Finish | None) -> tuple[str, int]:
        """Detokenize; the token that ended it all counts, but its text isn't the answer's."""
        hidden = (
            finish is not None
            and ids
            and finish.matched_token_id == ids[-1]
            and not self.generation.spec.include_special_tokens
        )
        delta = self.text.push(ids[:-1] if hidden else ids)
        return delta.text, delta.consumed_tokens + (
            1 if hidden and delta.matched_stop is None else 0
        )


class _PrefillLeg:
    """The sink of a choice's prefill leg: no tokens, only its end."""

    __slots__ = ("_choice", "_leg")

    def __init__(self, choice: _Choice, leg: RequestSpan) -> None:
        self._choice = choice
        self._leg = leg

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """A prefill worker sends none."""

    def finish(self, finish: Finish) -> None:
        self._choice.cached_tokens = max(self._choice.cached_tokens, finish.cached_tokens)
        if self._choice.awaits_prefill:
            self._choice.prompt_logprobs = finish.prompt_logprobs
            self._choice.awaits_prefill = False
            self._choice.generation.paced.urge()
        self._leg.finished(finish)

    def fail(self, error: ServingError) -> None:
        self._choice.lose(error)
        self._leg.failed(error)


class Generation:
    """One prompt and its answers.

    Order of calls: `start`, then iterate `deltas` to its end, then read `usage`; `close` always.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        text_model: TextModel,
        pacer: Pacer,
        on_close: Callable[[Generation], None],
        on_worked: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; nothing is sent yet.

        ``on_close`` is called once, by `close`; ``on_worked`` when the workers are through with all
        choices, which a client that reads slowly may not be for long.
        """
        self.spec = spec
        self._on_close: Callable[[Generation], None] | None = on_close
        self._on_worked = on_worked
        self._at_work = spec.n
        self.paced = pacer.stream(spec.min_interval_s)
        self._error: ServingError | None = None
        self.outcome = ""
        """For the log, once closed: finish reasons, a failure's, or ABANDONED by the client."""
        self._choices = [
            _Choice(
                self,
                index,
                ChoiceText(
                    text_model,
                    spec.stops,
                    skip_special_tokens=not spec.include_special_tokens,
                    continuation=spec.continuation,
                ),
            )
            for index in range(spec.n)
        ]

    def start(self, route: Route, ticket_key: TicketKey | None) -> None:
        """Start every choice on the route's workers; both legs of a hand-off at the same time.

        Raises:
            WorkerLostError: a worker went away just now; nothing keeps running.
        """
        try:
            for choice in self._choices:
                self._start_choice(choice, route, ticket_key)
        except ServingError as error:
            self.fail(error)
            raise

    def _start_choice(self, choice: _Choice, route: Route, ticket_key: TicketKey | None) -> None:
        spec = self.spec
        sampling = spec.sampling
        if sampling.seed is not None and choice.index:
            # Same seed, same answer: the n choices take seeds in a row.
            sampling = replace(sampling, seed=(sampling.seed + choice.index) % (1 << 63))
        start = GenerationStart(
            request_id=spec.request_id,
            token_ids=spec.token_ids,
            sampling=sampling,
            logprobs=spec.logprobs,
            trace=spec.trace,
            timeout_s=spec.timeout_s,
        )
        if route.prefill is not None:
            start = replace(start, ticket=_mint(route, ticket_key))
            leg = spec.telemetry.prefill_leg(route.prefill)
            choice.cancel_legs.append(_run(route.prefill, start, _PrefillLeg(choice, leg), leg))
            if spec.logprobs and spec.logprobs.prompt:  # only the leg that runs the prompt has them
                choice.awaits_prefill = True
                start = replace(start, logprobs=replace(spec.logprobs, prompt=False))
        choice.leg = spec.telemetry.decode_leg(route.decode)
        choice.cancel_legs.append(_run(route.decode, start, choice, choice.leg))

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Give out what the choices grew by, at most one delta each at a time, as paced.

        Raises:
            ServingError: a choice failed; what came before was given out.
        """
        waiting = True
        while True:
            await self.paced.wait()
            fresh = [delta for choice in self._choices if (delta := choice.take())]
            if self.complete:
                self._error = None  # it came too late: the client has every answer
            if fresh:
                if waiting and any(delta.token_ids for delta in fresh):
                    waiting = False
                    self.spec.telemetry.first_token()
                yield fresh
            if self.complete:
                return
            if self._error:
                raise self._error

    @property
    def complete(self) -> bool:
        """Whether every choice has given out its last delta."""
        return all(choice.ended for choice in self._choices)

    def cancel(self) -> None:
        """Ask the workers to stop; the choices then finish as CANCELLED."""
        for choice in self._choices:
            choice.cancel()

    def end_unstarted(self) -> None:
        """Cancelled before `start`: the choices finish as CANCELLED, as a worker would have it."""
        finish = Finish(
            reason=FinishReason.CANCELLED,
            prompt_tokens=len(self.spec.token_ids),
            completion_tokens=0,
        )
        for choice in self._choices:
            choice.finish(finish)

    def worked(self) -> None:
        """A choice's worker is through with it, well or not."""
        self._at_work -= 1
        if not self._at_work:
            self._on_worked()

    def fail(self, error: ServingError) -> None:
        """End with an error; the first one counts. The workers are told to stop.

        Does nothing once every choice has given out its last delta.
        """
        if self._error is None and not self.complete:
            self._error = error
            self.cancel()
            self.paced.urge()

    def close(self) -> None:
        """Stop whatever still runs; nobody hears of it. May be called at any time, twice too."""
        on_close, self._on_close = self._on_close, None
        if on_close is None:
            return
        self.outcome = self._outcome()
        try:
            self._tell()
        finally:  # whatever happens there, the workers stop and the place is free
            for choice in self._choices:
                choice.ended = True
            self.cancel()
            on_close(self)

    @property
    def failed_with(self) -> grpc.StatusCode | None:
        """The status of the error that ended it, if one did."""
        return self._error.code if self._error else None

    def _outcome(self) -> str:
        if self._error:
            return self._error.reason
        names = {reason.name for reason in self._finish_reasons()}
        return "+".join(sorted(names)) if self.complete else ABANDONED

    def _finish_reasons(self) -> list[FinishReason]:
        return [c.finish_reason for c in self._choices if c.ended and c.finish_reason]

    def _tell(self) -> None:
        error = self._error.reason if self._error else "" if self.complete else ABANDONED
        self.spec.telemetry.closed(self.usage(), self._finish_reasons(), error, self.spec.n)

    def usage(self) -> Usage:
        """Count what was used so far."""
        return Usage(
            prompt_tokens=len(self.spec.token_ids),
            completion_tokens=sum(choice.completion_tokens for choice in self._choices),
            cached_tokens=self._choices[0].cached_tokens,
        )

    def prompt_logprobs(self) -> Sequence[TokenLogprob]:
        """Give the prompt's logprobs, when asked for and finished."""
        return self._choices[0].prompt_logprobs

    def first_text(self) -> str:
        """Give choice 0's whole text, which goes into a conversation's context."""
        return "".join(self._choices[0].all_text)


def _run(
    worker: WorkerConnection, start: GenerationStart, sink: OutputSink, leg: RequestSpan
) -> Callable[[], None]:
    """Start one leg as a child of its span; answers the function that cancels it."""
    trace = leg.carry(start.trace)
    if trace is not start.trace:
        start = replace(start, trace=trace)
    try:
        return worker.start(start, sink)
    except ServingError as error:
        leg.failed(error)
        raise


def _mint(route: Route, ticket_key: TicketKey | None) -> Ticket:
    description = route.prefill.description if route.prefill else None
    if description is None:
        raise UnavailableError("the prefill worker just disconnected; retry")
    if ticket_key is None:
        raise UnavailableError("this server has no ticket key and can't use prefill workers")
    return ticket_key.mint(description.engine.bootstrap_host, description.engine.bootstrap_port)
