"""One model's workers, recomputed when one is added, removed or changed."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from millstream_server.control.engine import Role, WorkerDescription
from millstream_server.control.operations import LoraAdapter
from millstream_server.encode.encoder import EncoderInfo
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.sampling import Ability
from millstream_server.media.items import Modality
from millstream_server.routing.candidates import Absences, Candidates, retry_delay_s
from millstream_server.routing.pairs import Side, Unpaired, pair, side_of
from millstream_server.routing.plan import PlannedEncoding, RoutingRequest
from millstream_server.routing.policy import AFFINITY_SLACK, RoleWorkers, RoutingPolicy, requests_at
from millstream_server.routing.workers import Candidate, WorkerView, info_of, known
from millstream_server.runtime.errors import NoWorkerError, WorkerLostError

_ALONE = (Role.PREFILL, Role.AGGREGATED, Role.DIFFUSION)
"""What may be missing besides decode workers where no worker is left."""


@dataclass(frozen=True, slots=True)
class ModelWorkers:
    """What routing needs per request, computed once per change."""

    prefill: RoleWorkers
    decode: RoleWorkers
    decode_of: Mapping[Side, RoleWorkers]
    """Decode workers by what of a prefill worker decides: others couldn't use its KV cache."""
    aggregated: RoleWorkers
    """Workers that run prompt and tokens: AGGREGATED ones, or DIFFUSION ones that make text."""
    encoders: Sequence[WorkerView]
    """ENCODE workers; where there is none, the aggregated workers that encode for themselves."""
    modalities: frozenset[Modality]
    """Media that a request may have now."""
    hands_off: bool | None
    """Whether requests are handed off; None: decided per request."""
    ready: bool
    """Whether there is a worker of every role that a request needs."""
    running: int
    """Requests that the workers run at once."""
    open_tokens: int
    """Prompt tokens that the workers may have open; 0: it isn't known."""
    leaving: Sequence[WorkerView]
    """Workers that tokens still come from, but that drain or aren't usable now."""
    limits: GeneratorInfo | None
    """The engine limits for requests."""
    unpaired: Unpaired | None
    """Why there is no pair although both roles have workers; else None."""
    absent: Callable[..., NoWorkerError]
    """Makes the error that there is no worker of some roles."""
    made_s: float = field(default_factory=time.monotonic)
    """When the workers last changed."""

    def too_long_for_one(self, uncached: int, min_tokens: int) -> bool:
        """Return whether a prompt would hold up an aggregated worker's running answers.

        That is, if the worker had to compute ``min_tokens`` of it or more: ``uncached`` is how many
        it had to. What the prefill workers hold doesn't count: a short rest costs the aggregated
        worker less than a hand-off. While all workers of one way are full, requests go the other.
        """
        if self.prefill.full() or self.decode.full():
            return False
        return uncached >= min_tokens or self.aggregated.full()

    def decode_for(self, prefill: Candidate) -> RoleWorkers:
        if len(self.decode_of) > 1:
            return self.decode_of[side_of(prefill.worker)]
        return self.decode

    @property
    def connected(self) -> dict[Role, int]:
        roles = (self.prefill, self.decode, self.aggregated)
        found = {of.role: len(of.views) for of in roles if of.views}
        if self.encoders and not self.encodes_for_itself:
            found[Role.ENCODE] = len(self.encoders)
        return found

    @property
    def encodes_for_itself(self) -> bool:
        """Whether the worker that encodes must also be the one that generates."""
        return bool(self.encoders) and self.encoders[0] in self.aggregated.views

    def holder(self, request: RoutingRequest) -> Candidate:
        """Return the place of the worker that holds a request's media.

        Raises:
            WorkerLostError: it went away.
        """
        whole = self.aggregated
        places = [place for place in whole.places if place.address == request.media_at]
        place = whole.policy.pick(request, places)
        if place is None:
            raise WorkerLostError(
                "the worker that holds this request's media went away; send it again"
            )
        return place

    def encoder(
        self, request: RoutingRequest, sha256: bytes, avoid: Collection[str] = ()
    ) -> PlannedEncoding:
        """Pick the worker that encodes a file of a request.

        ``avoid`` are addresses of workers that have just failed. If the result is `own`, the
        request's other files, and the request itself, must go to the same worker
        (`RoutingRequest.media_at`).

        Raises:
            NoWorkerError: none can.
        """
        own = self.encodes_for_itself
        able = [view for view in self.encoders if view.address not in avoid]
        view: WorkerView | None
        if own and request.media_at:
            view = self.holder(request).worker
        elif own:
            place = self.aggregated.policy.pick(request, able)
            view = place.worker if place else None
        else:
            view = _by_hash(sha256, able)
        if view is None:
            raise self.absent(Role.ENCODE)
        return PlannedEncoding(view, own=own)

    @property
    def versions_differ(self) -> bool:
        """Whether no prefill worker has the same weight version as a decode worker."""
        return self.unpaired is not None and self.unpaired.by_version

    def require(self) -> None:
        """Check that there is a worker of every role that a request needs.

        Raises:
            NoWorkerError: a role has none.
        """
        if self.ready:
            return
        if self.unpaired:
            lasted_s = time.monotonic() - self.made_s
            raise NoWorkerError(self.unpaired.sentence, retry_delay_s=retry_delay_s(lasted_s))
        if self.decode.views:
            raise self.absent(Role.PREFILL)
        raise self.absent(Role.DECODE, *(() if self.prefill.views else _ALONE))


def workers_of(
    model: str,
    views: Collection[WorkerView],
    policies: Mapping[Role, RoutingPolicy],
    *,
    handoff: bool | None,
    absences: Absences,
) -> ModelWorkers:
    """Collect a model's workers; ``handoff`` is `Handoff.constant`."""
    absent = functools.partial(absences.error, model)
    by_role, leaving = _sorted(model, views)
    limits = _limits(by_role, _adapters(_known_engines(model, views)))
    decode_of, unpaired = pair(by_role)
    whole = _whole(by_role)
    hands_off = _way(by_role, handoff=handoff)
    decoding = [] if hands_off is False else by_role[Role.DECODE]
    answering = decoding + ([] if hands_off else list(whole[1]))

    open_tokens = _open_tokens(answering)
    if hands_off:
        open_tokens = min(open_tokens, _open_tokens(by_role[Role.PREFILL]))

    def of(role: Role, views: Sequence[WorkerView]) -> RoleWorkers:
        return RoleWorkers(role, views, Candidates.of(views), policies[role], absent)

    encoders = by_role[Role.ENCODE] or [
        view
        for view in by_role[Role.AGGREGATED]
        if view.description and view.description.encoder and not hands_off
    ]
    return ModelWorkers(
        encoders=encoders,
        modalities=_modalities(limits, encoders),
        prefill=of(Role.PREFILL, by_role[Role.PREFILL]),
        decode=of(Role.DECODE, by_role[Role.DECODE]),
        decode_of={side: of(Role.DECODE, views) for side, views in decode_of.items()},
        aggregated=of(*whole),
        hands_off=hands_off,
        ready=bool(answering),
        running=sum(v.description.engine.max_running_requests for v in answering if v.description),
        open_tokens=open_tokens,
        leaving=leaving,
        limits=limits,
        unpaired=unpaired,
        absent=absent,
    )


def _sorted(
    model: str, views: Iterable[WorkerView]
) -> tuple[dict[Role, list[WorkerView]], list[WorkerView]]:
    """Return a model's workers that accept requests, by role, and those that are leaving."""
    by_role: dict[Role, list[WorkerView]] = {role: [] for role in Role}
    leaving = []
    for view in sorted(views, key=lambda view: view.address):
        last = view.last_description
        if view.description and view.description.model == model:
            by_role[view.description.role].append(view)
        elif not view.description and last and last.model == model and _answers(last):
            leaving.append(view)
    return by_role, leaving


def _open_tokens(views: Iterable[WorkerView]) -> int:
    engines = [info_of(view.description, GeneratorInfo) for view in views]
    return sum(engine.most_open_tokens for engine in engines if engine)


def _answers(worker: WorkerDescription) -> bool:
    """Return whether tokens come from a worker; such ones limit how many requests run at once."""
    answering = (Role.DECODE, Role.AGGREGATED, Role.DIFFUSION)
    return worker.role in answering and info_of(worker, GeneratorInfo) is not None


def _whole(by_role: Mapping[Role, Sequence[WorkerView]]) -> tuple[Role, Sequence[WorkerView]]:
    """Return the workers that run prompt and tokens, and their role; a model has one kind."""
    diffusion = [
        view for view in by_role[Role.DIFFUSION] if view.description and _answers(view.description)
    ]
    if diffusion and not by_role[Role.AGGREGATED]:
        return Role.DIFFUSION, diffusion
    return Role.AGGREGATED, by_role[Role.AGGREGATED]


def _way(by_role: Mapping[Role, Sequence[WorkerView]], *, handoff: bool | None) -> bool | None:
    if not (by_role[Role.PREFILL] and by_role[Role.DECODE]):
        return False
    return handoff if by_role[Role.AGGREGATED] else True


def _modalities(
    limits: GeneratorInfo | None, encoders: Sequence[WorkerView]
) -> frozenset[Modality]:
    """Return what both the model takes and an encoder encodes."""
    if limits is None or limits.media is None:
        return frozenset()
    encoded = [info_of(view.description, EncoderInfo) for view in encoders]
    return limits.media.modalities & frozenset().union(*(e.modalities for e in encoded if e))


def _by_hash(sha256: bytes, views: Sequence[WorkerView]) -> WorkerView | None:
    """Pick the worker that encodes a file; None: there is none.

    The same file goes to the same worker, where its embedding is cached, unless that worker is
    clearly busier than another. Rendezvous hashing: D. Thaler, C. Ravishankar, "A name-based
    mapping scheme for rendezvous" (1996).
    """
    least = min(map(requests_at, views), default=0)
    free = [view for view in views if requests_at(view) <= least + AFFINITY_SLACK]

    def rank(view: WorkerView) -> bytes:
        return hashlib.blake2b(sha256 + view.address.encode(), digest_size=8).digest()

    return max(free, key=rank, default=None)


def _limits(
    by_role: Mapping[Role, Sequence[WorkerView]], adapters: tuple[LoraAdapter, ...]
) -> GeneratorInfo | None:
    """Combine a model's engines into the limits for requests."""
    engines = {
        role: [engine for view in views if (engine := info_of(view.description, GeneratorInfo))]
        for role, views in by_role.items()
    }
    aggregated = engines[Role.AGGREGATED] or engines[Role.DIFFUSION]
    prompts = aggregated + engines[Role.PREFILL]
    tokens = aggregated + engines[Role.DECODE]
    if not (prompts or tokens):
        return None
    abilities = frozenset.intersection(*(e.abilities for e in tokens or prompts))
    # Prompt logprobs depend on the workers that run prompts, all else on those that generate.
    if all(Ability.PROMPT_LOGPROBS in engine.abilities for engine in prompts or tokens):
        abilities |= {Ability.PROMPT_LOGPROBS}
    shortest = min(prompts + tokens, key=lambda engine: engine.context_length)
    refused = frozenset().union(*(engine.refused_fields for engine in prompts + tokens))
    return replace(
        shortest,
        abilities=abilities,
        refused_fields=refused,
        takes_adapters=bool(adapters) or any(e.takes_adapters for e in prompts + tokens),
        adapters=adapters,
    )


def _known_engines(
    model: str, views: Iterable[WorkerView]
) -> Mapping[Role, Sequence[GeneratorInfo]]:
    """Return a model's engines by role, also those of workers that accept no requests now."""
    found: dict[Role, list[GeneratorInfo]] = {role: [] for role in Role}
    for view in views:
        last = known(view)
        if last and last.model == model and (engine := info_of(last, GeneratorInfo)):
            found[last.role].append(engine)
    return found


def _adapters(engines: Mapping[Role, Sequence[GeneratorInfo]]) -> tuple[LoraAdapter, ...]:
    """Return the adapters that requests may name: one worker has it, or one of both roles."""
    whole, prompts, tokens = (
        {adapter.name: adapter for role in roles for e in engines[role] for adapter in e.adapters}
        for roles in ((Role.AGGREGATED, Role.DIFFUSION), (Role.PREFILL,), (Role.DECODE,))
    )
    found = whole | {name: prompts[name] for name in prompts.keys() & tokens.keys()}
    return tuple(found[name] for name in sorted(found))


def adapters_of(view: WorkerView) -> frozenset[str]:
    """Return the names of the adapters that a worker that accepts requests has."""
    engine = info_of(view.description, GeneratorInfo)
    return engine.adapter_names() if engine else frozenset()
