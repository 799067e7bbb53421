"""Starting a choice's legs on the workers of a plan."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from millstream_server.engines.base import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import MAX_SEED, Ability
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor.legs import Leg, Workers
from millstream_server.processor.telemetry import TurnTelemetry
from millstream_server.runtime.errors import UnavailableError

if TYPE_CHECKING:
    from millstream_server.processor.media.encoding import EncodedPart
    from millstream_server.processor.pacing import Pacer
    from millstream_server.routing.plan import Plan
    from millstream_server.routing.workers import WorkerView
    from millstream_server.transfer.embeddings.ticket import EmbeddingTickets
    from millstream_server.transfer.ticket import Ticket, TicketKey

_SEED_BITS = MAX_SEED.bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParts:
    """What all generations of a process share."""

    pacer: Pacer
    workers: Workers
    ticket_key: TicketKey | None = None
    embedding_tickets: EmbeddingTickets | None = None
    """Signs the tickets of media; None: without a key."""
    unread: UnreadOutput = field(default_factory=UnreadOutput)
    """Bounds the output that clients don't read."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What the choices of a generation need to start on the workers of its plan."""

    plan: Plan
    request: GenerationRequest
    parts: GenerationParts
    telemetry: TurnTelemetry
    encoded: Sequence[EncodedPart] = ()
    """The prompt's media, in its order."""
    seed: int | None = None
    """Choice 0's (`first_seed`)."""

    @property
    def hands_off(self) -> bool:
        """Whether the plan has a prefill and a decode leg."""
        return len(self.plan.legs) > 1

    def request_of(self, index: int) -> GenerationRequest:
        """Return a choice's request: the n choices use consecutive seeds."""
        request, seed = self.request, self.seed
        if seed is None:
            return request
        seed = (seed + index) % (MAX_SEED + 1)
        return replace(request, sampling=replace(request.sampling, seed=seed))

    def mint(self) -> Ticket:
        """Make the ticket of a hand-off.

        Raises:
            UnavailableError: the prefill worker is gone, or this server can't make tickets.
        """
        prefill = self.plan.legs[0]
        return _mint(prefill.worker, prefill.dp_rank, self.parts.ticket_key)

    def start(self, leg: Leg, number: int, request: GenerationRequest) -> None:
        """Start the plan's leg ``number``.

        Raises:
            WorkerLostError: its worker isn't connected.
        """
        planned = self.plan.legs[number]
        address = planned.worker.address
        if self.encoded and planned.role is not Role.DECODE:
            request = replace(request, prompt=self._with_tickets(request.prompt))
        sampling = self.request.sampling
        if self.seed is not None and sampling.seed is None and not _takes_seed(planned.worker):
            request = replace(request, sampling=sampling)  # the worker would refuse a seed
        if planned.dp_rank is not None or planned.cached_tokens:
            request = replace(
                request,
                dp_rank=planned.dp_rank,
                expected_cached_tokens=planned.cached_tokens,
            )
        span = self.telemetry.leg(planned.role, address)
        leg.start(self.parts.workers, address, request, span)

    def _with_tickets(self, prompt: Prompt) -> Prompt:
        """Name where the worker that runs the prompt fetches its media."""
        tickets = self.parts.embedding_tickets
        if tickets is None:
            raise UnavailableError("this server has no ticket key and can't use media")
        media = tuple(
            replace(item, ticket=tickets.mint(source.address, source.item))
            for item, source in zip(prompt.media, self.encoded, strict=True)
        )
        return replace(prompt, media=media)


def first_seed(request: GenerationRequest, plan: Plan) -> int | None:
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


def _mint(prefill: WorkerView, dp_rank: int | None, ticket_key: TicketKey | None) -> Ticket:
    engine = prefill.description.engine if prefill.description else None
    if not isinstance(engine, GeneratorInfo):
        raise UnavailableError("the prefill worker just disconnected; retry")
    if ticket_key is None:
        raise UnavailableError("this server has no ticket key and can't use prefill workers")
    return ticket_key.mint(engine.bootstrap_host, engine.bootstrap_port, prefill_dp_rank=dp_rank)
