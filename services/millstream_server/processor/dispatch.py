"""Starts the legs of a turn where its plan has them, with seeds and the tickets of hand-offs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import Finish
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import MAX_SEED, Ability, new_seed
from millstream_server.generation.ticket import MAX_ENGINE_DATA_BYTES, EngineData
from millstream_server.processor.leg import Leg
from millstream_server.routing.workers import info_of
from millstream_server.runtime.errors import KvTransferError, UnavailableError
from millstream_server.runtime.frozen import changed

if TYPE_CHECKING:
    from millstream_server.generation.ticket import KvTransfer, Ticket, TicketKey
    from millstream_server.processor.choice import Choice
    from millstream_server.processor.media.core import TurnMedia
    from millstream_server.routing.plan import Plan, PlannedLeg
    from millstream_server.routing.workers import Candidate


class Dispatch:
    """One turn's way to its workers. It knows no turn: that would be a cycle."""

    __slots__ = ("_key", "_plan", "_request", "seed")

    def __init__(
        self,
        request: GenerationRequest,
        plan: Plan,
        key: TicketKey | None,
        seed: int | None,
    ) -> None:
        """Prepare; ``seed``: choice 0's of an earlier start, None: this is the first."""
        self._request = request
        self._plan = plan
        self._key = key
        self.seed = first_seed(request, plan) if seed is None else seed
        """Choice 0's; None: the engine draws without one."""

    @property
    def cache_follows(self) -> bool:
        """Whether prefill writes the KV cache after its leg: decode has its data for that."""
        transfer = self._plan.transfer
        return transfer is not None and bool(transfer.data) and not transfer.prefill_first

    def start(self, choice: Choice, media: TurnMedia | None) -> None:
        """Start a choice's leg; of two legs both, or only the prompt's if the plan is in sequence.

        ``media`` are the prompt's.

        Raises:
            UnavailableError: a worker has just disconnected.
        """
        legs, logprobs, transfer = self._plan.legs, self._request.logprobs, self._plan.transfer
        changes: dict[str, Any] = {}
        if media and media.encoded:
            changes["prompt"] = media.with_tickets(self._request.prompt)
        if len(legs) == 1:
            self._start(choice, legs[0], choice, changes)
            return
        choice.prompt_leg, choice.dispatch = Leg(choice.turn), self
        ticket = _mint(legs[0], transfer, self._key)
        choice.wants_prompt_logprobs = logprobs is not None and logprobs.prompt
        self._start(choice.prompt_leg, legs[0], choice, {**changes, "ticket": ticket})
        choice.ticket = ticket
        if transfer is None or not transfer.prefill_first:
            self._start_answer(choice)

    def go_on(self, choice: Choice, prefilled: Finish) -> None:
        """Start the answering leg of a plan in sequence, when the prompt's has ended well.

        Raises:
            ServingError: the prefill worker has given wrong data, or the worker isn't connected.
        """
        ticket, key = choice.ticket, self._key
        if ticket is not None and key is not None:  # always: `start` has minted it
            choice.ticket = key.renew(ticket, _engine_data(prefilled, self._plan.transfer))
            self._start_answer(choice)

    def _start_answer(self, choice: Choice) -> None:
        ticket, choice.ticket = choice.ticket, None
        changes: dict[str, Any] = {"ticket": ticket}
        if choice.wants_prompt_logprobs and self._request.logprobs:  # only the first leg has them
            changes["logprobs"] = replace(self._request.logprobs, prompt=False)
        self._start(choice, self._plan.legs[1], choice, changes)

    def _start(
        self, leg: Leg, planned: PlannedLeg, choice: Choice, changes: dict[str, Any]
    ) -> None:
        request = self._request
        given = request.sampling.seed
        if self.seed is not None and (given is not None or _takes_seed(planned.place)):
            seed = (self.seed + choice.index) % (MAX_SEED + 1)  # the n choices' are consecutive
            if seed != given:
                changes["sampling"] = changed(request.sampling, {"seed": seed})
        leg.start(planned, request, changes)


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
