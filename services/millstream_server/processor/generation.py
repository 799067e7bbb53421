"""One prompt's generation: started on its plan's workers, returned as paced deltas.

A `Generation` has n `Choice`s, and a choice one `Leg` per worker of the plan. Workers push tokens
into the legs; `deltas` returns them as text when the pacer allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from millstream_server.generation.logprobs import logprob_bytes, output_bytes
from millstream_server.generation.output import Finish, FinishReason, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.links.unread import overflow
from millstream_server.processor.choice import Choice
from millstream_server.processor.delivery import Delivery, Outlet
from millstream_server.processor.held_output import HeldOutput
from millstream_server.processor.launch import GenerationParts, Launch, first_seed
from millstream_server.processor.legs import Leg
from millstream_server.processor.telemetry import ABANDONED, NO_TELEMETRY, TurnTelemetry, Usage
from millstream_server.processor.text.output import ChoiceText
from millstream_server.runtime.errors import Failure, ServingError

if TYPE_CHECKING:
    from millstream_server.processor.media.encoding import TurnMedia
    from millstream_server.processor.options import Options
    from millstream_server.processor.queue.admission import Admission
    from millstream_server.processor.text.tokenizer import TextModel
    from millstream_server.routing.plan import Plan


class Generation:
    """One prompt and its n choices.

    Order of calls: `start` or `end_unstarted`, `deltas` until `complete`, `usage`; `close` always.
    Its legs report to it (`legs.LegEvents`), its `delivery` passes their output on.
    """

    def __init__(
        self,
        request: GenerationRequest,
        options: Options,
        text_model: TextModel,
        admission: Admission,
        parts: GenerationParts,
        *,
        telemetry: TurnTelemetry = NO_TELEMETRY,
        continuation: bool = False,
        media: TurnMedia | None = None,
    ) -> None:
        """Prepare; nothing is sent yet.

        ``admission`` is released when the workers have finished, which may be long before a slow
        client has read everything. ``continuation``: the text continues the prompt's, so its
        leading space is kept. ``media`` is released when the workers have used it.
        """
        self.request = request
        self.options = options
        self.telemetry = telemetry
        self.text_model = text_model
        self.workers: tuple[str, ...] = ()
        """Where it runs (`Plan.places`); empty if it never started."""
        self.seed: int | None = None
        """Choice 0's, set by the first `start`; None: the engine draws without one."""
        self.outcome = ""
        """Set by `close`: finish reasons, a failure's reason, or ABANDONED (the client is gone)."""
        self._media = media
        self._parts = parts
        self._admission = admission
        self._legs_open = options.n
        """Number of choices whose answering leg runs."""
        self._closed = False
        self._choices = [self._choice(index, continuation) for index in range(options.n)]
        paced = parts.pacer.stream(options.min_interval_s)
        held = HeldOutput(parts.unread, self._choices, self._overflowed)
        self.delivery = Delivery(self._choices, paced, held, telemetry.first_token)
        self._end_call: Callable[[ServingError], None] = lambda _: None
        self.deltas = self.delivery.deltas
        """Waits for new output, as paced, and returns it; see `Delivery.deltas`."""

    def _choice(self, index: int, continuation: bool) -> Choice:  # noqa: FBT001
        special = self.options.include_special_tokens
        text = ChoiceText(
            self.text_model,
            self.options.stops,
            skip_special_tokens=not special,
            continuation=continuation,
        )
        return Choice(index, self, text, show_matched_token=special, shares=self.options.n)

    # ---- to the workers

    def start(self, plan: Plan) -> None:
        """Start every choice on the plan's workers.

        Raises:
            UnavailableError: a worker has just disconnected; `close` stops what was started.
        """
        self.workers = plan.places
        if self.seed is None:
            self.seed = first_seed(self.request, plan)
        encoded = self._media.encoded if self._media else ()
        launch = Launch(plan, self.request, self._parts, self.telemetry, encoded, self.seed)
        for choice in self._choices:
            choice.start(launch)

    def end_unstarted(self) -> None:
        """Finish the choices as CANCELLED, when cancelled before `start`."""
        finish = Finish(
            reason=FinishReason.CANCELLED,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=0,
        )
        for choice in self._choices:
            choice.answer.finish(finish)

    def cancel(self) -> None:
        """Cancel at the workers; the choices then finish as CANCELLED."""
        for choice in self._choices:
            choice.cancel()

    def fail(self, error: Failure) -> None:
        """End with an error and cancel at the workers; only the first error counts.

        No effect once the last delta of every choice has been returned.
        """
        if self.delivery.fail(error):
            self.cancel()

    def _overflowed(self) -> None:
        """End: the client doesn't read, and what it has not read was dropped."""
        error = overflow()
        self.delivery.drop(error)
        self.cancel()
        self._end_call(error)

    # ---- from the workers (`legs.LegEvents`)

    def progressed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """New tokens have arrived; the pacer decides when they are returned."""
        delivery = self.delivery
        delivery.paced.touch()
        if delivery.paced.gathers:
            delivery.held.add(output_bytes(token_ids, logprobs))
        if self._media:
            self._release_used(self._media)

    def leg_ended(self, leg: Leg) -> None:
        """Handle a leg's end or failure; release the admission when the last leg has ended."""
        choice = next(c for c in self._choices if leg is c.answer or leg is c.prompt)
        if leg.result and leg.result.prompt_logprobs:
            self.delivery.held.add(logprob_bytes(leg.result.prompt_logprobs))
        if self._media:
            self._release_used(self._media)
        if leg.error is None:
            if choice.answer_waits and not (self._closed or self.error):
                self._start_answer(choice)
            self.delivery.paced.urge()
        elif choice.needs:
            self.fail(leg.error)
        if leg is choice.answer:
            self._legs_open -= 1
            if not self._legs_open:
                self._admission.leave()

    def _release_used(self, media: TurnMedia) -> None:
        """Give the media back once every choice's prompt has run: it has tokens, or has ended."""
        if all(c.answer.token_ids or c.token_ids or c.answer.over for c in self._choices):
            self._media = None
            media.release()

    def _start_answer(self, choice: Choice) -> None:
        try:
            choice.start_answer()
        except ServingError as error:
            self.fail(error)

    # ---- to the client

    def send_through(
        self, outlet: Outlet, payer: Hashable, end_call: Callable[[ServingError], None]
    ) -> None:
        """See `Delivery.send_through`; ``end_call`` ends the RPC of a client that doesn't read."""
        self._end_call = end_call
        self.delivery.send_through(outlet, payer)

    @property
    def complete(self) -> bool:
        """Whether the last delta of every choice has been returned."""
        return self.delivery.complete

    def close(self) -> None:
        """Stop what still runs, without deltas or errors. May be called at any time, also twice."""
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
            if self._media:
                self._media.release()
            self.delivery.close()
            self._admission.leave()

    @property
    def error(self) -> Failure | None:
        """The failure that ended it, or None."""
        return self.delivery.error

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
        results = (choice.answer.result for choice in self._choices)
        return ", ".join(dict.fromkeys(r.weight_version for r in results if r and r.weight_version))

    def prompt_logprobs(self) -> Sequence[TokenLogprob]:
        """Return the prompt's logprobs; empty if not requested or not complete."""
        return self._choices[0].prompt_logprobs

    def first_text(self) -> str:
        """Return choice 0's whole text, which goes into a conversation's context."""
        return self._choices[0].text
