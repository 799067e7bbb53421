"""A running turn: a prompt on its workers, from its start to its end.

What its choices make of the workers' tokens leaves by its `TurnOutput`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import Finish, FinishReason, logprob_bytes
from millstream_server.generation.request import GenerationRequest
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor.choice import Choice
from millstream_server.processor.dispatch import Dispatch
from millstream_server.processor.leg import Leg, Workers
from millstream_server.processor.read_choice import ReadChoice
from millstream_server.processor.telemetry import ABANDONED, TurnTelemetry, Usage
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.workers import info_of
from millstream_server.runtime.errors import Failure, KvTransferError, ServingError

if TYPE_CHECKING:
    from millstream_server.generation.ticket import TicketKey
    from millstream_server.processor.admission import Admission
    from millstream_server.processor.answer import Reading
    from millstream_server.processor.conversation import Options
    from millstream_server.processor.media.core import TurnMedia
    from millstream_server.processor.output import OutputCall, Pacer, TurnOutput
    from millstream_server.processor.redispatch import Redispatcher
    from millstream_server.processor.successor import Redispatched
    from millstream_server.processor.text.tokenizer import TextModel
    from millstream_server.routing.plan import Plan
    from millstream_server.routing.workers import Candidate


TRANSFER_S = 30.0
"""How long a transfer may take after prefill's leg: as long as workers give theirs by default."""


def _may_wait(place: Candidate, tokens: int) -> bool:
    """Return whether a prompt of so many tokens may wait for room, or for the end of a pause."""
    load, engine = place.load, info_of(place.worker.description, GeneratorInfo)
    if load is None or engine is None:
        return True
    free = (load.total_blocks - load.used_blocks) * engine.block_size
    return free < tokens or load.running_requests >= engine.max_running_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParts:
    """What all turns of a process share."""

    pacer: Pacer
    workers: Workers
    ticket_key: TicketKey | None = None
    unread: UnreadOutput = field(default_factory=UnreadOutput)
    """Bounds the output that clients don't read."""
    redispatch: Redispatcher | None = None
    """Finds other workers for lost ones; None: what they ran fails."""


class Turn:
    """One prompt with its n choices.

    Order of calls: `start` or `end_unstarted`; `Call.send_from` with its `output`; `close` always.
    """

    __slots__ = ("__weakref__", "_admission", "_closed", "_timers", "cancelled", "choices", "error",
                 "media", "options", "outcome", "output", "parts", "reading", "redispatches",
                 "request", "seed", "shown", "switched", "telemetry", "text_model", "used",
                 "workers")  # fmt: skip

    def __init__(
        self,
        request: GenerationRequest,
        options: Options,
        text_model: TextModel,
        admission: Admission,
        parts: TurnParts,
        *,
        call: OutputCall,
        output: TurnOutput,
        telemetry: TurnTelemetry,
        continuation: bool = False,
        media: TurnMedia | None = None,
        reading: Reading | None = None,
    ) -> None:
        """Prepare; nothing is sent yet.

        ``output`` goes to ``call``. ``admission`` is released when workers have finished, which may
        be long before a slow client has read everything. ``continuation``: the text continues the
        prompt's, so its leading space is kept. ``media`` is released when the workers have used it.
        ``reading``: how the answers are read; None: they are text, without special tokens.
        """
        self.request = request
        self.options = options
        self.text_model = text_model
        self.parts = parts
        self.telemetry = telemetry
        self.output = output
        self.media = media
        self.shown: Mapping[int, str] = reading.shown if reading else {}
        self.reading = reading = reading if reading and reading.parsed else None
        self.workers: tuple[str, ...] = ()
        """Where it runs (`Plan.places`); empty if it never started."""
        self.seed: int | None = None
        """Choice 0's, set by the first `start`; None: the engine draws without one."""
        self.redispatches: tuple[Redispatched, ...] = ()
        """Each time that a choice went on at another worker."""
        self.switched = False
        """The template was told how to reason."""
        self.error: Failure | None = None
        """The failure that ended it."""
        self.cancelled = False
        """Its choices end as soon as their workers have stopped."""
        self.outcome = ""
        """Set by `close`: finish reasons, a failure's reason, or ABANDONED (the client is gone)."""
        self.used: Usage
        """Set by `close`: the final token counts."""
        self._admission = admission
        self._closed = False
        self._timers: list[asyncio.TimerHandle] = []
        self.choices = [
            ReadChoice(self, i, reading, continuation=continuation)
            if reading
            else Choice(self, i, continuation=continuation)
            for i in range(options.n)
        ]
        output.begin(self, call)

    # ---- to the workers

    def routed(self, session: tuple[str, ...]) -> RoutingRequest:
        """Return what routing gets; ``session``: where the conversation's last turn ran."""
        request = self.request
        return RoutingRequest(
            model=request.model,
            token_ids=request.token_ids,
            media_start=request.prompt.media_start,
            session=session,
            media_at=self.media.held_at if self.media else "",
            session_key=self.options.session,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )

    def start(self, plan: Plan) -> None:
        """Start every choice on the plan's workers.

        Raises:
            UnavailableError: a worker has just disconnected; `close` stops what was started.
        """
        self.workers = plan.places
        dispatch = Dispatch(self.request, plan, self.parts.ticket_key, self.seed)
        self.seed = dispatch.seed
        for choice in self.choices:
            dispatch.start(choice, self.media)

    def end_unstarted(self) -> None:
        """Finish the choices as CANCELLED, when cancelled before `start`."""
        tokens = len(self.request.prompt)
        for choice in self.choices:
            choice.finish(
                Finish(reason=FinishReason.CANCELLED, prompt_tokens=tokens, completion_tokens=0)
            )

    def cancel(self) -> None:
        """Cancel at the workers; the choices then finish as CANCELLED."""
        self.cancelled = True
        for choice in self.choices:
            choice.cancel()

    def fail(self, error: Failure) -> None:
        """End with an error, after the output so far, and cancel at the workers.

        Only the first error counts, and none once the last delta of every choice has been made.
        """
        if self.error is None and not self.complete:
            self.error = error
            self.output.send_now()
            self.cancel()

    # ---- from the workers

    def leg_ended(self, leg: Leg) -> None:
        """Handle a leg's end or failure; release the admission when the last leg has ended."""
        choice = next(c for c in self.choices if leg is c or leg is c.prompt_leg)
        if leg.result and leg.result.prompt_logprobs:
            self.output.count(logprob_bytes(leg.result.prompt_logprobs))
        if leg.error is None:
            if choice.ticket is not None and not (self._closed or self.error):
                self._go_on(choice, leg)
            elif leg is choice.prompt_leg and choice.dispatch and choice.dispatch.cache_follows:
                self._await_cache(choice, leg)
            self.output.send_now()
        elif choice.needs(leg):
            self._lost(choice, leg, leg.error)
        if self.media:  # what goes on before its first token needs them again
            self.release_media()
        if leg is choice and all(choice.over for choice in self.choices):
            self.output.workers_ended()
            self._admission.leave()

    def _await_cache(self, choice: Choice, prompt: Leg) -> None:
        """Fail a hand-off whose KV cache doesn't come: prefill has done its part."""

        def look() -> None:
            if choice.prompt_leg is not prompt or choice.has_tokens or choice.over:
                return
            if choice.place is None or _may_wait(choice.place, len(self.request.prompt)):
                self._await_cache(choice, prompt)
            else:
                choice.lose(KvTransferError("the KV cache did not arrive from prefill in time"))

        self._timers.append(asyncio.get_running_loop().call_later(TRANSFER_S, look))

    def _lost(self, choice: Choice, leg: Leg, error: ServingError) -> None:
        """Go on elsewhere with what a failed leg has left, if this can be; else fail."""
        redispatch = self.parts.redispatch
        over = self._closed or self.error is not None
        if over or redispatch is None or not redispatch.take_over(self, choice, leg, error):
            self.fail(error)

    def _go_on(self, choice: Choice, prompt: Leg) -> None:
        """Start the answering leg of a plan in sequence; if the prompt's was cancelled, end it."""
        result, dispatch = prompt.result, choice.dispatch
        if not (result and dispatch):
            return  # never: `Dispatch.start` has set it
        if self.cancelled or result.reason is FinishReason.CANCELLED:
            ended = replace(result, reason=FinishReason.CANCELLED, completion_tokens=0)
            choice.finish(ended)  # the prompt's leg may have ended before the cancel arrived
            return
        try:
            dispatch.go_on(choice, result)
        except ServingError as error:
            self.fail(error)

    def release_media(self) -> None:
        """Give the media back once every choice's prompt has run: it has tokens, or has ended."""
        if self.media and all(choice.has_tokens or choice.over for choice in self.choices):
            media, self.media = self.media, None
            media.release()

    # ---- its end

    @property
    def complete(self) -> bool:
        return None not in [choice.finish_reason for choice in self.choices]

    def close(self) -> None:
        """Stop what still runs, without a message or error. May be called at any time, or twice."""
        if self._closed:
            return
        self._closed, complete = True, self.complete
        for timer in self._timers:
            timer.cancel()
        reasons = [c.finish_reason for c in self.choices if c.finish_reason]
        error = self.error.reason if self.error else "" if complete else ABANDONED
        self.outcome = error or "+".join(sorted({reason.name for reason in reasons}))
        self.used = self.usage()
        try:
            self.telemetry.ended(self.used, reasons, error, self.options.n)
        finally:  # always: cancel at the workers and release the admission
            if not complete:
                self.cancel()
            if self.media:
                self.media.release()
            self.output.close()
            self._admission.leave()

    def usage(self) -> Usage:
        """Return the token counts so far."""
        prompt, choices = self.request.prompt, self.choices
        return Usage(
            len(prompt.token_ids),
            sum([len(choice.token_ids) for choice in choices]),
            min(choices[0].cached_tokens, len(prompt)),  # more if it went on: output, too
            prompt.media_tokens,
            sum([choice.reasoning_tokens for choice in choices]) if self.reading else 0,
        )
