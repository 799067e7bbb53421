"""A running turn: its choices' tokens come in, its call pulls messages out.

Workers push tokens into the choices. The first of them asks the call (`Call.ready`), and when that
can be written, it asks the turn for its next message, which has all that has come meanwhile. So a
client that reads slowly gets fewer and longer messages, and nothing is stored twice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from millstream_server.engines.base import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.logprobs import logprob_bytes
from millstream_server.generation.output import Finish, FinishReason, TokenLogprob
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import MAX_SEED, Ability
from millstream_server.links.unread import UnreadOutput, overflow
from millstream_server.processor.choice import MOST_TOKENS, Choice, Delta, Leg, Workers
from millstream_server.processor.telemetry import ABANDONED, NO_TELEMETRY, TurnTelemetry, Usage
from millstream_server.runtime.errors import Failure, ServingError, UnavailableError

if TYPE_CHECKING:
    from millstream_server.processor.media.encoding import TurnMedia
    from millstream_server.processor.options import Options
    from millstream_server.processor.pacing import Pacer
    from millstream_server.processor.queue.admission import Admission
    from millstream_server.processor.text.tokenizer import TextModel
    from millstream_server.routing.plan import Plan, PlannedLeg
    from millstream_server.routing.workers import WorkerView
    from millstream_server.runtime.rpc.call import Call
    from millstream_server.transfer.embeddings.ticket import EmbeddingTickets
    from millstream_server.transfer.ticket import Ticket, TicketKey

_SEED_BITS = MAX_SEED.bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParts:
    """What all turns of a process share."""

    pacer: Pacer
    workers: Workers
    ticket_key: TicketKey | None = None
    embedding_tickets: EmbeddingTickets | None = None
    """Signs the tickets of media; None: without a key."""
    unread: UnreadOutput = field(default_factory=UnreadOutput)
    """Bounds the output that clients don't read."""


class Rendering(Protocol):
    """Makes a call's messages of a turn's output (`responses.Messages`)."""

    def of_text(self, text: str, tokens: int) -> Any:
        """Make a message that is not the first: one choice's text and its number of tokens."""
        ...

    def of(self, deltas: Sequence[Delta], turn: Turn) -> tuple[Any] | Iterator[Any]:
        """Make the messages of new output: one or, if it is large or the end, several."""
        ...


class Turn:
    """One prompt with its n choices, from its start on the workers to its last message.

    Order of calls: `start` or `end_unstarted`; `Call.send_from` with it, which calls `next` until
    `over`; `close` always. A `runtime.rpc.call.Source`, and a `links.unread.Gathering`.
    """

    __slots__ = ("__weakref__", "_admission", "_call", "_choices", "_closed", "_first_token_sent",
                 "_interval_s", "_legs_open", "_nbytes", "_overflowed", "_parts_left", "_plain",
                 "_plan", "_rendering", "_sent_s", "_starting", "_timer", "_unfinished",
                 "caller_key", "error",
                 "gathers", "longest_interval_s", "media", "options", "outcome", "over", "parts",
                 "request", "scheduled", "seed", "telemetry", "text_model",
                 "workers")  # fmt: skip

    def __init__(
        self,
        request: GenerationRequest,
        options: Options,
        text_model: TextModel,
        admission: Admission,
        parts: TurnParts,
        *,
        call: Call,
        rendering: Rendering,
        telemetry: TurnTelemetry = NO_TELEMETRY,
        continuation: bool = False,
        media: TurnMedia | None = None,
    ) -> None:
        """Prepare; nothing is sent yet.

        ``rendering`` makes the messages of ``call``. ``admission`` is released when workers have
        finished, which may be long before a slow client has read everything. ``continuation``: the
        text continues the prompt's, so its leading space is kept. ``media`` is released when the
        workers have used it.
        """
        self.request = request
        self.options = options
        self.text_model = text_model
        self.parts = parts
        self.telemetry = telemetry
        self.workers: tuple[str, ...] = ()
        """Where it runs (`Plan.places`); empty if it never started."""
        self.seed: int | None = None
        """Choice 0's, set by the first `start`; None: the engine draws without one."""
        self.error: Failure | None = None
        """The failure that ended it."""
        self.outcome = ""
        """Set by `close`: finish reasons, a failure's reason, or ABANDONED (the client is gone)."""
        self.media = media
        self._admission = admission
        self._plan: Plan | None = None
        self._choices = [Choice(self, i, continuation=continuation) for i in range(options.n)]
        self._legs_open = self._unfinished = options.n
        """Choices whose answering leg runs, and whose last delta was not made."""
        self._closed = False
        # Output
        self._call = call
        self._rendering = rendering
        extras = options.n > 1 or options.return_token_ids or request.logprobs or options.stops
        self._plain = not extras
        """Nearly every message has a text and a token count, no more."""
        self._parts_left: Iterator[Any] | None = None
        """The messages of output that needs several."""
        self._first_token_sent = False
        self.over = False
        # When it is sent
        self.scheduled = False
        """The call was asked, or will be: more output changes nothing."""
        self._interval_s = options.min_interval_s
        self._sent_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.longest_interval_s = 0.0
        self._starting = True
        parts.pacer.starting += 1
        # What it holds for a client that doesn't read
        self.caller_key: Hashable = call.caller_key
        self.gathers = False
        self._nbytes = 0
        self._overflowed = False

    # ---- to the workers

    def start(self, plan: Plan) -> None:
        """Start every choice on the plan's workers.

        Raises:
            UnavailableError: a worker has just disconnected; `close` stops what was started.
        """
        self._plan = plan
        self.workers = plan.places
        if self.seed is None:
            self.seed = _first_seed(self.request, plan)
        for choice in self._choices:
            if len(plan.legs) == 1:
                self._start_leg(choice, plan.legs[0], choice, {})
                continue
            choice.prompt = Leg(self)
            ticket = _mint(plan.legs[0], self.parts.ticket_key)
            logprobs = self.request.logprobs
            choice.wants_prompt_logprobs = logprobs is not None and logprobs.prompt
            self._start_leg(choice.prompt, plan.legs[0], choice, {"ticket": ticket})
            choice.ticket = ticket
            if plan.concurrent:
                self._start_answer(choice)

    def _start_answer(self, choice: Choice) -> None:
        """Start the second leg of a hand-off."""
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
        if self.seed is not None and (given is not None or _takes_seed(planned.worker)):
            seed = (self.seed + choice.index) % (MAX_SEED + 1)  # the n choices' are consecutive
            if seed != given:
                changes["sampling"] = replace(request.sampling, seed=seed)
        encoded = self.media.encoded if self.media else ()
        if encoded and planned.role is not Role.DECODE:
            changes["prompt"] = self._with_tickets(request.prompt, encoded)
        leg.start(planned, request, changes)

    def _with_tickets(self, prompt: Prompt, encoded: Sequence[Any]) -> Prompt:
        """Name where the worker that runs the prompt fetches its media."""
        tickets = self.parts.embedding_tickets
        if tickets is None:
            raise UnavailableError("this server has no ticket key and can't use media")
        media = tuple(
            replace(item, ticket=tickets.mint(source.address, source.item))
            for item, source in zip(prompt.media, encoded, strict=True)
        )
        return replace(prompt, media=media)

    def end_unstarted(self) -> None:
        """Finish the choices as CANCELLED, when cancelled before `start`."""
        for choice in self._choices:
            choice.finish(
                Finish(
                    reason=FinishReason.CANCELLED,
                    prompt_tokens=len(self.request.prompt),
                    completion_tokens=0,
                )
            )

    def cancel(self) -> None:
        """Cancel at the workers; the choices then finish as CANCELLED."""
        for choice in self._choices:
            choice.cancel()

    def fail(self, error: Failure) -> None:
        """End with an error, after the output so far, and cancel at the workers.

        Only the first error counts, and none once the last delta of every choice has been made.
        """
        if self.error is None and not self.complete:
            self.error = error
            self._urge()
            self.cancel()

    # ---- from the workers

    def leg_ended(self, leg: Leg) -> None:
        """Handle a leg's end or failure; release the admission when the last leg has ended."""
        choice = next(c for c in self._choices if leg is c or leg is c.prompt)
        if leg.result and leg.result.prompt_logprobs:
            self.count(logprob_bytes(leg.result.prompt_logprobs))
        if self.media:
            self.release_media()
        if leg.error is None:
            if choice.ticket is not None and not (self._closed or self.error):
                self._go_on(choice, leg)
            self._urge()
        elif choice.needs_legs:
            self.fail(leg.error)
        if leg is choice:
            self._legs_open -= 1
            if not self._legs_open:
                self._admission.leave()

    def _go_on(self, choice: Choice, prompt: Leg) -> None:
        """Start the answering leg of a plan in sequence; if the prompt's was cancelled, end it."""
        if prompt.result and prompt.result.reason is FinishReason.CANCELLED:
            choice.finish(prompt.result)
            return
        try:
            self._start_answer(choice)
        except ServingError as error:
            self.fail(error)

    def release_media(self) -> None:
        """Give the media back once every choice's prompt has run: it has tokens, or has ended."""
        if self.media and all(choice.has_tokens or choice.over for choice in self._choices):
            media, self.media = self.media, None
            media.release()

    # ---- when output is sent

    def schedule(self) -> None:
        """Ask the call to be written: at once, or after the interval since the last message."""
        self.scheduled = True
        if self._starting:
            self._call.ready()
        elif self._interval_s:
            interval_s = max(self._interval_s, self.parts.pacer.interval_s)
            loop = asyncio.get_running_loop()
            wait_s = self._sent_s + interval_s - loop.time()
            if wait_s <= 0:
                self._call.ready()
                return
            self.longest_interval_s = max(self.longest_interval_s, interval_s)
            self._timer = loop.call_later(wait_s, self._call.ready)
        elif self.parts.pacer.interval_s:
            self.longest_interval_s = max(self.longest_interval_s, self.parts.pacer.interval_s)
            self.parts.pacer.later(self._call.ready)
        else:
            self._call.ready()

    def _urge(self) -> None:
        """Ask the call to be written at once: an end, an error, or the rest of a message."""
        self.scheduled = True
        self._call.ready()

    # ---- the next message

    def next(self) -> Any:
        """Make a message of what has come; see `Source.next`.

        Raises:
            ServingError: a choice failed; its output before that was sent, unless so much gathered
            that it was dropped.
        """
        if self._interval_s or self._starting:
            self._begin_interval()
        else:
            self.scheduled = self.gathers = False
        if self._overflowed and self.error:
            raise self.error
        choice = self._choices[0]
        if (
            self._plain
            and choice.unsent
            and choice.result is None
            and self._parts_left is None
            and self._first_token_sent
            and self.error is None
            and not self._nbytes
            and len(choice.unsent) <= MOST_TOKENS
        ):
            return self._rendering.of_text(*choice.take_text())
        return self._next()

    def _begin_interval(self) -> None:
        self.scheduled = False
        if self._interval_s:
            self.gathers = True
            self._sent_s = asyncio.get_running_loop().time()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        else:
            self.gathers = False
        if self._starting:
            self._starting = False
            self.parts.pacer.starting -= 1

    def _next(self) -> Any:
        """Make any message; that of a token takes less time."""
        if self._parts_left is None:
            deltas = self._take()
            self._recount()
            if self.complete:
                self.error = None  # too late: everything has been made
            if not deltas:
                if self.error:
                    raise self.error
                return None
            made = self._rendering.of(deltas, self)
            if isinstance(made, tuple):  # nearly always
                if self.error or any(choice.has_more for choice in self._choices):
                    self._urge()
                return made[0]
            self._parts_left = made
        message = next(self._parts_left, None)
        if message is None or self.over:
            self._parts_left = None  # it knows this object
        if message is None:
            return self._next()
        if not self.over:
            self._urge()
        return message

    def _take(self) -> list[Delta]:
        deltas = []
        for choice in self._choices:
            delta = choice.take()
            if delta is not None:
                deltas.append(delta)
                if delta.token_ids and not self._first_token_sent:
                    self._first_token_sent = True
                    self.telemetry.first_token()
                if delta.finish_reason is not None:
                    self._unfinished -= 1
        return deltas

    @property
    def complete(self) -> bool:
        """Whether the last delta of every choice has been made."""
        return not self._unfinished

    def end(self) -> None:
        """Note that the last message is made: it can't be taken back.

        Raises:
            ServingError: what should come before it was dropped.
        """
        if self.error is not None:
            raise self.error
        self.over = True
        self._stop_counting()

    # ---- what it holds for a client that doesn't read

    def count(self, nbytes: int) -> None:
        """Count output that has come while the call can't be written."""
        if self._closed or self._overflowed:
            self._drop()
            return
        if not self._nbytes:
            nbytes = sum(choice.held_bytes for choice in self._choices)  # also what came before
        self._nbytes += nbytes
        self.parts.unread.add(self, nbytes)

    def _recount(self) -> None:
        if self._nbytes:
            self._stop_counting()
            self._nbytes = held = sum(choice.held_bytes for choice in self._choices)
            if held:
                self.parts.unread.add(self, held)

    def _stop_counting(self) -> None:
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self.parts.unread.remove(self, nbytes)

    def _drop(self) -> None:
        for choice in self._choices:
            choice.drop()

    def overflowed(self) -> None:
        """End: the client doesn't read, and what it has not read is dropped."""
        error = overflow()
        self.error, self._overflowed, self._parts_left = error, True, None
        self._drop()
        self._stop_counting()
        self.cancel()
        self._call.fail(error)

    # ---- its end

    def close(self) -> None:
        """Stop what still runs, without a message or error. May be called at any time, or twice."""
        if self._closed:
            return
        self._closed = True
        reasons = [c.finish_reason for c in self._choices if c.finish_reason]
        error = self.error.reason if self.error else "" if self.complete else ABANDONED
        self.outcome = error or "+".join(sorted({reason.name for reason in reasons}))
        try:
            self.telemetry.ended(self.usage(), reasons, error, self.options.n)
        finally:  # always: cancel at the workers and release the admission
            if not self.complete:
                self.cancel()
            if self.media:
                self.media.release()
            self._begin_interval()
            self._stop_counting()
            self._parts_left = None
            self.scheduled = self.gathers = True  # what still comes is dropped
            self._admission.leave()

    def usage(self) -> Usage:
        """Return the token counts so far."""
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=sum(len(choice.token_ids) for choice in self._choices),
            cached_tokens=self._choices[0].cached_tokens,
            media_tokens=self.request.prompt.media_tokens,
        )

    @property
    def weight_version(self) -> str:
        """The version of the weights that made it; several only if its choices differ in it."""
        results = (choice.result for choice in self._choices)
        return ", ".join(dict.fromkeys(r.weight_version for r in results if r and r.weight_version))

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob]:
        """The prompt's logprobs; empty if not requested or not complete."""
        result = self._choices[0].prompt.result
        return result.prompt_logprobs if result else ()

    @property
    def first_text(self) -> str:
        """Choice 0's whole text, which goes into a conversation's context."""
        return self._choices[0].text


def _first_seed(request: GenerationRequest, plan: Plan) -> int | None:
    """Return choice 0's seed: the client's or, if a worker of the plan takes one, a random one.

    An engine that takes seeds may use the same one for all requests without (SGLang uses 42), which
    then get the same tokens each time. Greedy ones get them anyway.
    """
    sampling = request.sampling
    if sampling.seed is not None or sampling.temperature == 0:
        return sampling.seed
    if any(_takes_seed(leg.worker) for leg in plan.legs):
        return secrets.randbits(_SEED_BITS)
    return None


def _takes_seed(worker: WorkerView) -> bool:
    engine = worker.description.engine if worker.description else None
    return isinstance(engine, GeneratorInfo) and Ability.SEED in engine.abilities


def _mint(prefill: PlannedLeg, ticket_key: TicketKey | None) -> Ticket:
    """Make the ticket of a hand-off.

    Raises:
        UnavailableError: the prefill worker is gone, or this server can't make tickets.
    """
    description = prefill.worker.description
    engine = description.engine if description else None
    if not isinstance(engine, GeneratorInfo):
        raise UnavailableError("the prefill worker just disconnected; retry")
    if ticket_key is None:
        raise UnavailableError("this server has no ticket key and can't use prefill workers")
    return ticket_key.mint(
        engine.bootstrap_host, engine.bootstrap_port, prefill_dp_rank=prefill.dp_rank
    )
