"""One model's workers, recomputed when one is added, removed or changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from millstream_server.control.adapters import LoraAdapter
from millstream_server.encoding.encoder import EncoderInfo
from millstream_server.engines.base import Role, WorkerDescription
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.sampling import Ability
from millstream_server.media.items import Modality
from millstream_server.routing.policy import Policy
from millstream_server.routing.request import RoutingRequest
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import NoWorkerError

_ANSWERING = (Role.DECODE, Role.AGGREGATED, Role.DIFFUSION)
"""The workers that tokens come from: they limit how many requests run at once."""


@dataclass(frozen=True, slots=True)
class RoleWorkers:
    """A model's workers of one role that accept requests, in order of address."""

    role: Role
    views: Sequence[WorkerView]
    policy: Policy

    def pick(self, request: RoutingRequest) -> WorkerView:
        """Pick a worker by the policy.

        Raises:
            NoWorkerError: there is none, or the policy's filters exclude all.
        """
        view = self.policy.pick(request, self.views)
        if view is None:
            raise no_worker(self.role, "can take this request" if self.views else "is connected")
        return view


@dataclass(frozen=True, slots=True)
class ModelWorkers:
    """What routing needs per request, computed once per change."""

    prefill: RoleWorkers
    decode: RoleWorkers
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
    leaving: Sequence[WorkerView]
    """Workers that tokens still come from, but that drain or aren't usable now."""
    limits: GeneratorInfo | None
    """The engine limits for requests."""

    @property
    def capacity(self) -> int:
        """Requests that can run at once, plus those on draining workers; 0 when not ready."""
        if not self.leaving:
            return self.running
        return self.running and self.running + sum(view.in_use for view in self.leaving)

    @property
    def encodes_for_itself(self) -> bool:
        """Whether the worker that encodes must also be the one that generates."""
        return bool(self.encoders) and self.encoders[0] in self.aggregated.views

    def require(self) -> None:
        """Check that there is a worker of every role that a request needs.

        Raises:
            NoWorkerError: a role has none.
        """
        if not self.ready:
            raise no_worker(Role.PREFILL if self.decode.views else Role.DECODE, "is connected")


def workers_of(
    model: str,
    views: Iterable[WorkerView],
    policies: Mapping[Role, Policy],
    *,
    handoff: bool | None,
) -> ModelWorkers:
    """Collect a model's workers; ``handoff`` is `HandoffDecider.constant`."""
    by_role, leaving = _sorted(model, views)
    whole = _whole(by_role)
    hands_off = _way(by_role, handoff=handoff)
    decoding = [] if hands_off is False else by_role[Role.DECODE]
    answering = decoding + ([] if hands_off else list(whole[1]))

    def of(role: Role, views: Sequence[WorkerView]) -> RoleWorkers:
        return RoleWorkers(role, views, policies[role])

    encoders = by_role[Role.ENCODE] or [
        view
        for view in by_role[Role.AGGREGATED]
        if view.description and view.description.encoder and not hands_off
    ]
    limits = _limits(by_role)
    return ModelWorkers(
        encoders=encoders,
        modalities=_modalities(limits, encoders),
        prefill=of(Role.PREFILL, by_role[Role.PREFILL]),
        decode=of(Role.DECODE, by_role[Role.DECODE]),
        aggregated=of(*whole),
        hands_off=hands_off,
        ready=bool(answering),
        running=sum(v.description.engine.max_running_requests for v in answering if v.description),
        leaving=leaving,
        limits=limits,
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


def _answers(worker: WorkerDescription) -> bool:
    return worker.role in _ANSWERING and isinstance(worker.engine, GeneratorInfo)


def _whole(
    by_role: Mapping[Role, Sequence[WorkerView]],
) -> tuple[Role, Sequence[WorkerView]]:
    """Return the workers that run prompt and tokens, and their role; a model has one kind."""
    diffusion = [
        view for view in by_role[Role.DIFFUSION] if view.description and _answers(view.description)
    ]
    if diffusion and not by_role[Role.AGGREGATED]:
        return Role.DIFFUSION, diffusion
    return Role.AGGREGATED, by_role[Role.AGGREGATED]


def no_worker(role: Role, what: str) -> NoWorkerError:
    """Make the error that no worker of a role is available."""
    return NoWorkerError(
        f"no {role.value} worker for this model {what}; retry in a moment", retry_delay_s=1.0
    )


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
    encoded = [encoder_of(view) for view in encoders]
    return limits.media.modalities & frozenset().union(*(e.modalities for e in encoded if e))


def encoder_of(view: WorkerView) -> EncoderInfo | None:
    """Return what a worker encodes; None: nothing."""
    if view.description is None:
        return None
    for info in (view.description.encoder, view.description.engine):
        if isinstance(info, EncoderInfo):
            return info
    return None


def _limits(by_role: Mapping[Role, Sequence[WorkerView]]) -> GeneratorInfo | None:
    """Combine a model's engines into the limits for requests."""
    engines = {
        role: [
            view.description.engine
            for view in views
            if view.description and isinstance(view.description.engine, GeneratorInfo)
        ]
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
        takes_adapters=any(engine.takes_adapters for engine in prompts + tokens),
        adapters=_adapters(aggregated, engines[Role.PREFILL], engines[Role.DECODE]),
    )


def _adapters(
    aggregated: Sequence[GeneratorInfo],
    prefill: Sequence[GeneratorInfo],
    decode: Sequence[GeneratorInfo],
) -> tuple[LoraAdapter, ...]:
    """Return the adapters that requests may name: one worker has it, or one of both roles."""
    whole, prompts, tokens = (
        {adapter.name: adapter for engine in engines for adapter in engine.adapters}
        for engines in (aggregated, prefill, decode)
    )
    found = whole | {name: prompts[name] for name in prompts.keys() & tokens.keys()}
    return tuple(found[name] for name in sorted(found))
