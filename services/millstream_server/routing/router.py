"""Routes requests to workers: keeps their views, computes capacity, plans requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from millstream_server.engines.base import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.validation import check_adapter
from millstream_server.media.items import Modality
from millstream_server.routing.absences import Absences
from millstream_server.routing.encoders import pick_encoder
from millstream_server.routing.handoff import AlwaysHandOff, HandoffDecider
from millstream_server.routing.model_workers import ModelWorkers, workers_of
from millstream_server.routing.plan import Plan, PlannedEncoding, PlannedLeg
from millstream_server.routing.policy import RoutingPolicy
from millstream_server.routing.prefix.prefixes import Prefixes
from millstream_server.routing.request import RoutingRequest
from millstream_server.routing.task_workers import TaskWorkers, known, task_workers_of
from millstream_server.routing.tasks import Task, tasks_of
from millstream_server.routing.workers import Candidate, WorkerView
from millstream_server.runtime.errors import NoWorkerError, WorkerLostError


class Router:
    """Keeps the views of all workers. All calls come from one event loop.

    The owner of the views calls `add`, `remove`, and `changed` after a view's description changed.
    """

    def __init__(
        self,
        make_policy: Callable[[], RoutingPolicy],
        handoff: HandoffDecider | None = None,
        prefixes: Prefixes | None = None,
        *,
        concurrent_legs: bool = True,
    ) -> None:
        """Start without workers; each role of a model has its own policy.

        ``prefixes``: what the workers cache, for policies and deciders that use it; every worker is
        admitted to it. ``concurrent_legs`` False: for engines that start decode only after prefill
        has ended.
        """
        self._make_policy = make_policy
        self._handoff = handoff or AlwaysHandOff()
        self.prefixes = prefixes
        """What workers cache; links feed it. None: nothing decides by it."""
        self._concurrent = concurrent_legs
        self._views: list[WorkerView] = []
        self._models: dict[str, ModelWorkers] = {}
        """Cache, emptied when a worker is added, removed or changed."""
        self._adapters: dict[tuple[str, str], ModelWorkers] = {}
        """Likewise, by model and adapter: the workers that have the adapter."""
        self._task_workers: dict[str, TaskWorkers] = {}
        """Likewise."""
        self._policies: dict[str, dict[Role, RoutingPolicy]] = {}
        """By model and role; kept when workers change."""
        self._plans: dict[tuple[Candidate, ...], Plan] = {}
        self._watchers: list[Callable[[], None]] = []
        self._absences = Absences()

    # ---- workers come and go ---------------------------------------------------------------------

    def add(self, view: WorkerView) -> None:
        """Add a worker."""
        self._views.append(view)
        self.changed()

    def remove(self, view: WorkerView) -> None:
        """Remove a worker."""
        self._views.remove(view)
        if self.prefixes:
            self.prefixes.dismiss(view)
        self.changed()

    def changed(self) -> None:
        """Recompute: a view's description changed."""
        accepting = (view.description for view in self._views)
        self._absences.changed({(found.model, found.role) for found in accepting if found})
        self._models.clear()
        self._adapters.clear()
        self._task_workers.clear()
        self._plans.clear()
        for callback in self._watchers:
            callback()

    def watch(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after every change of workers."""
        self._watchers.append(callback)

    # ---- what a model's workers can take ---------------------------------------------------------

    def connected(self, model: str) -> dict[Role, int]:
        """Count a model's workers that accept requests, by role."""
        workers = self._of(model)
        roles = (workers.prefill, workers.decode, workers.aggregated)
        found = {of.role: len(of.views) for of in roles if of.views}
        if workers.encoders and not workers.encodes_for_itself:
            found[Role.ENCODE] = len(workers.encoders)
        return found | self.task_workers(model).connected

    def tasks(self, model: str) -> frozenset[Task]:
        """Return what a model's workers do; workers that accept no requests now count too."""
        found = [known(view) for view in self._views]
        return frozenset().union(*(tasks_of(d) for d in found if d and d.model == model))

    def task_workers(self, model: str) -> TaskWorkers:
        """Return a model's workers for images, videos, vectors and scores."""
        found = self._task_workers.get(model)
        if found is None:
            found = self._task_workers[model] = task_workers_of(
                model, self._views, self._policies_of(model), self._absences
            )
        return found

    def ready(self, model: str) -> bool:
        """Return whether there is a worker of every role that a request needs."""
        return self._of(model).ready or bool(self.task_workers(model).views)

    def versions_differ(self, model: str) -> bool:
        """Return whether a model isn't ready only because its workers' weights differ."""
        workers = self._of(model)
        return workers.versions_differ and not workers.ready

    def runs_in(self, model: str, role: Role) -> bool:
        """Return whether whole requests for a model run on workers of ``role``."""
        whole = self._of(model).aggregated
        return bool(whole.views) and whole.role is role

    def capacity(self, model: str) -> int:
        """Count the requests that a model's workers run at once; 0 when a needed role is missing.

        A draining worker counts with the requests it still runs, since those use no capacity of the
        others. Cancelled requests there don't count, even if the worker never ends them.
        """
        workers, whole = self._of(model), self.task_workers(model)
        return workers.capacity + (whole.capacity if whole.views else 0)

    def limits(self, model: str) -> GeneratorInfo | None:
        """Return the engine limits for a model's requests; None without workers."""
        return self._of(model).limits

    def require(self, model: str) -> None:
        """Check that a request can be routed now.

        Raises:
            NoWorkerError: a role that it needs has no worker.
        """
        workers = self._of(model)
        if not workers.ready:
            workers.require()

    def absent(self, model: str, role: Role) -> NoWorkerError:
        """Make the error that a model has no worker of a role."""
        return self._absences.error(model, role)

    # ---- one request -----------------------------------------------------------------------------

    def plan(self, request: RoutingRequest) -> Plan:
        """Pick the workers for a request: prefill and decode, or one that runs all of it.

        Raises:
            NoWorkerError: a role that it needs has no worker.
            AdapterNotFoundError: no worker has its LoRA adapter.
        """
        workers = self._models.get(request.model) or self._of(request.model)
        if not workers.ready:
            workers.require()
        if request.adapter:
            workers = self._with_adapter(request, workers)
        picked = self._pick(request, workers)
        if self.prefixes is None:
            return self._plans.get(picked) or self._plan_of(picked)
        cached_tokens = self.prefixes.of(request.model).sent(request, picked[0])
        known = None if cached_tokens else self._plans.get(picked)
        return known or self._plan_of(picked, cached_tokens)

    def _pick(self, request: RoutingRequest, workers: ModelWorkers) -> tuple[Candidate, ...]:
        if request.media_at:
            return (_holder(workers, request),)
        hands_off = workers.hands_off
        if hands_off is None:
            whole = workers.aggregated.pick(request)
            if not self._handoff.hands_off(request, workers, self._uncached(request, whole)):
                return (whole,)
        elif not hands_off:
            return (workers.aggregated.pick(request),)
        prefill = workers.prefill.pick(request)
        return prefill, workers.decode_for(prefill).pick(request)

    def _uncached(self, request: RoutingRequest, place: Candidate) -> int:
        prefixes = self.prefixes
        cached = prefixes.of(request.model).overlaps(request).tokens(place) if prefixes else 0
        return len(request.token_ids) - cached

    # ---- media -----------------------------------------------------------------------------------

    def modalities(self, model: str) -> frozenset[Modality]:
        """Return the media that a model's requests may have now."""
        return self._of(model).modalities

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
        workers = self._of(request.model)
        if workers.encodes_for_itself:
            if request.media_at:
                return PlannedEncoding(_holder(workers, request).worker, own=True)
            able = [view for view in workers.encoders if view.address not in avoid]
            place = workers.aggregated.policy.pick(request, able)
            view = place.worker if place else None
        else:
            view = pick_encoder(sha256, workers.encoders, avoid)
        if view is None:
            raise self.absent(request.model, Role.ENCODE)
        return PlannedEncoding(view, own=workers.encodes_for_itself)

    def _plan_of(self, picked: tuple[Candidate, ...], cached_tokens: int = 0) -> Plan:
        prompt, *rest = picked
        roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE)
        if not rest:
            worker = prompt.worker.description
            roles = (worker.role if worker else Role.AGGREGATED,)
        legs = (
            PlannedLeg(roles[0], prompt, cached_tokens),
            *(PlannedLeg(Role.DECODE, place) for place in rest),
        )
        plan = Plan(legs, concurrent=self._concurrent)
        if not cached_tokens:
            self._plans[picked] = plan
        return plan

    def _of(self, model: str) -> ModelWorkers:
        """Return a served model's workers; computed once per change."""
        workers = self._models.get(model)
        if workers is None:
            workers = self._models[model] = self._collect(model, self._views)
        return workers

    def _with_adapter(self, request: RoutingRequest, workers: ModelWorkers) -> ModelWorkers:
        """Return those of a model's workers that have the request's adapter."""
        model, adapter = request.model, request.adapter
        able = self._adapters.get((model, adapter))
        if able is None:
            if workers.limits:
                check_adapter(adapter, workers.limits)
            views = [view for view in self._views if adapter in _adapters_of(view)]
            able = self._collect(model, views)
            if not (able.ready or able.versions_differ):
                raise NoWorkerError(
                    f"the workers that have the LoRA adapter {adapter} accept no requests now; "
                    "retry in a moment",
                    retry_delay_s=1.0,
                )
            able.require()
            self._adapters[model, adapter] = able
        return able

    def _collect(self, model: str, views: Sequence[WorkerView]) -> ModelWorkers:
        if self.prefixes:
            for view in views:
                if view.description:
                    self.prefixes.admit(view, view.description)
        return workers_of(
            model,
            views,
            self._policies_of(model),
            handoff=self._handoff.constant,
            absences=self._absences,
        )

    def _policies_of(self, model: str) -> dict[Role, RoutingPolicy]:
        policies = self._policies.get(model)
        if policies is None:
            policies = self._policies[model] = {role: self._make_policy() for role in Role}
        return policies


def _holder(workers: ModelWorkers, request: RoutingRequest) -> Candidate:
    """Return the place of the worker that holds a request's media."""
    whole = workers.aggregated
    places = [place for place in whole.places if place.address == request.media_at]
    place = whole.policy.pick(request, places)
    if place is None:
        raise WorkerLostError("the worker that holds this request's media went away; send it again")
    return place


def _adapters_of(view: WorkerView) -> frozenset[str]:
    engine = view.description.engine if view.description else None
    return engine.adapter_names() if isinstance(engine, GeneratorInfo) else frozenset()
