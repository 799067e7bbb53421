"""A running turn: a prompt on its workers, from its start to its end.

What its choices make of the workers' tokens leaves by its `TurnOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from millstream_server.control.engine import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import Finish, FinishReason, logprob_bytes
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import MAX_SEED, Ability, new_seed
from millstream_server.generation.ticket import MAX_ENGINE_DATA_BYTES, EngineData
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor.choice import Choice, Leg, Workers
from millstream_server.processor.read_choice import ReadChoice
from millstream_server.processor.telemetry import ABANDONED, TurnTelemetry, Usage
from millstream_server.routing.workers import info_of
from millstream_server.runtime.errors import (
    Failure,
    KvTransferError,
    ServingError,
    UnavailableError,
)

if TYPE_CHECKING:
    from millstream_server.generation.ticket import KvTransfer, Ticket, TicketKey
    from millstream_server.processor.admission import Admission
    from millstream_server.processor.answer import Reading
    from millstream_server.processor.conversation import Options
    from millstream_server.processor.media.core import TurnMedia
    from millstream_server.processor.output import Pacer, TurnOutput
    from millstream_server.processor.text.tokenizer import TextModel
    from millstream_server.routing.plan import Plan, PlannedLeg
    from millstream_server.routing.workers import Candidate
    from millstream_server.runtime.rpc.call import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParts:
    """What all turns of a process share."""

    pacer: Pacer
    workers: Workers
    ticket_key: TicketKey | None = None
    unread: UnreadOutput = field(default_factory=UnreadOutput)
    """Bounds the output that clients don't read."""


class Turn:
    """One prompt with its n choices.

    Order of calls: `start` or `end_unstarted`; `Call.send_from` with its `output`; `close` always.
    """

    __slots__ = ("__weakref__", "_admission", "_cancelled", "_closed", "_plan", "choices",
                 "error", "media", "options", "outcome", "output", "parts", "reading", "request",
                 "seed",
                 "telemetry", "text_model", "used", "workers")  # fmt: skip

    def __init__(
        self,
        request: GenerationRequest,
        options: Options,
        text_model: TextModel,
        admission: Admission,
        parts: TurnParts,
        *,
        call: Call,
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
        ``reading``: how the answers are read; None: they are text.
        """
        self.request = request
        self.options = options
        self.text_model = text_model
        self.parts = parts
        self.telemetry = telemetry
        self.output = output
        self.media = media
        self.reading = reading
        self.workers: tuple[str, ...] = ()
        """Where it runs (`Plan.places`); empty if it never started."""
        self.seed: int | None = None
        """Choice 0's, set by the first `start`; None: the engine draws without one."""
        self.error: Failure | None = None
        """The failure that ended it."""
        self._cancelled = False
        self.outcome = ""
        """Set by `close`: finish reasons, a failure's reason, or ABANDONED (the client is gone)."""
        self.used: Usage
        """Set by `close`: the final token counts."""
        self._admission = admission
        self._plan: Plan | None = None
        self._closed = False
        self.choices = [
            ReadChoice(self, i, reading) if reading else Choice(self, i, continuation=continuation)
            for i in range(options.n)
        ]
        output.begin(self, call)

    # ---- to the workers

    def start(self, plan: Plan) -> None:
        """Start every choice on the plan's workers.

        Raises:
            UnavailableError: a worker has just disconnected; `close` stops what was started.
        """
        self._plan = plan if len(plan.legs) > 1 else None
        self.workers = plan.places
        if self.seed is None:
            self.seed = first_seed(self.request, plan)
        first, logprobs, transfer = plan.legs[0], self.request.logprobs, plan.transfer
        for choice in self.choices:
            if len(plan.legs) == 1:
                self._start_leg(choice, first, choice, {})
                continue
            choice.prompt_leg = Leg(self)
            ticket = _mint(first, transfer, self.parts.ticket_key)
            choice.wants_prompt_logprobs = logprobs is not None and logprobs.prompt
            self._start_leg(choice.prompt_leg, first, choice, {"ticket": ticket})
            choice.ticket = ticket
            if transfer is None or not transfer.prefill_first:
                self._start_answer(choice)

    def _start_answer(self, choice: Choice) -> None:
        ticket, choice.ticket = choice.ticket, None
        changes: dict[str, Any] = {"ticket": ticket}
        if choice.wants_prompt_logprobs and self.request.logprobs:  # only the first leg has them
            changes["logprobs"] = replace(self.request.logprobs, prompt=False)
        if self._plan is not None:
            self._start_leg(choice, self._plan.legs[1], choice, changes)

    def _start_leg(
        self, leg: Leg, planned: PlannedLeg, choice: Choice, changes: dict[str, Any]
    ) -> None:
        request = self.request
        given = request.sampling.seed
        if self.seed is not None and (given is not None or _takes_seed(planned.place)):
            seed = (self.seed + choice.index) % (MAX_SEED + 1)  # the n choices' are consecutive
            if seed != given:
                changes["sampling"] = replace(request.sampling, seed=seed)
        if self.media and self.media.encoded and planned.role is not Role.DECODE:
            changes["prompt"] = self.media.with_tickets(request.prompt)
        leg.start(planned, request, changes)

    def end_unstarted(self) -> None:
        """Finish the choices as CANCELLED, when cancelled before `start`."""
        tokens = len(self.request.prompt)
        for choice in self.choices:
            choice.finish(
                Finish(reason=FinishReason.CANCELLED, prompt_tokens=tokens, completion_tokens=0)
            )

    def cancel(self) -> None:
        """Cancel at the workers; the choices then finish as CANCELLED."""
        self._cancelled = True
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
        if self.media:
            self.release_media()
        if leg.error is None:
            if choice.ticket is not None and not (self._closed or self.error):
                self._go_on(choice, leg)
            self.output.send_now()
        elif choice.needs(leg):
            self.fail(leg.error)
        if leg is choice and all(choice.over for choice in self.choices):
            self._admission.leave()

    def _go_on(self, choice: Choice, prompt: Leg) -> None:
        """Start the answering leg of a plan in sequence; if the prompt's was cancelled, end it."""
        result, ticket = prompt.result, choice.ticket
        plan, key = self._plan, self.parts.ticket_key
        if not (result and ticket and plan and key):
            return  # never: `start` has set them
        if self._cancelled or result.reason is FinishReason.CANCELLED:
            ended = replace(result, reason=FinishReason.CANCELLED, completion_tokens=0)
            choice.finish(ended)  # the prompt's leg may have ended before the cancel arrived
            return
        try:
            choice.ticket = key.renew(ticket, _engine_data(result, plan.transfer))
            self._start_answer(choice)
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
            choices[0].cached_tokens,
            prompt.media_tokens,
            sum([choice.reasoning_tokens for choice in choices]) if self.reading else 0,
        )


def first_seed(request: GenerationRequest, plan: Plan) -> int | None:
    """Return choice 0's seed: the client's or, if a worker of the plan takes one, a random one.

    An engine that takes seeds may use the same one for all requests without (SGLang uses 42), which
    then get the same tokens each time. Greedy ones get them anyway.
    """
    sampling = request.sampling
    if sampling.seed is not None or sampling.temperature == 0:
        return sampling.seed
    if any(_takes_seed(leg.place) for leg in plan.legs):
        return new_seed()
    return None


def _takes_seed(place: Candidate) -> bool:
    engine = info_of(place.worker.description, GeneratorInfo)
    return engine is not None and Ability.SEED in engine.abilities


def _engine_data(prefilled: Finish, transfer: KvTransfer | None) -> EngineData | None:
    """Return what goes from the prefill to the decode engine; it is signed next.

    Raises:
        KvTransferError: it isn't what the prefill worker may say.
    """
    given = prefilled.engine_data
    if transfer is None or given is None:
        return EngineData(transfer.kind, b"") if transfer else None
    if given.kind != transfer.kind:
        raise KvTransferError("the prefill worker's hand-off data is of another kind than its own")
    if (nbytes := len(given.data)) > MAX_ENGINE_DATA_BYTES:
        bound = f"at most {MAX_ENGINE_DATA_BYTES} are allowed"
        raise KvTransferError(f"the prefill worker's hand-off data has {nbytes} bytes; {bound}")
    return given


def _mint(prefill: PlannedLeg, transfer: KvTransfer | None, ticket_key: TicketKey | None) -> Ticket:
    """Make the ticket of a hand-off.

    Raises:
        UnavailableError: the prefill worker is gone, or this server can't make tickets.
    """
    engine = info_of(prefill.place.worker.description, GeneratorInfo)
    if engine is None:
        raise UnavailableError("the prefill worker just disconnected; retry")
    if ticket_key is None:
        raise UnavailableError("this server has no ticket key and can't use prefill workers")
    return ticket_key.mint(
        engine.bootstrap_host,
        engine.bootstrap_port,
        prefill_dp_rank=prefill.place.dp_rank,
        engine_data=EngineData(transfer.kind, transfer.data) if transfer else None,
    )
