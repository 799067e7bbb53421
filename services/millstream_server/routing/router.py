"""Routes requests to workers: keeps their views, computes capacity, plans requests."""

from __future__ import annotations

from collections.abc import Callable, Collection

from millstream_server.engines.base import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.media.items import Modality
from millstream_server.routing.encoders import pick_encoder
from millstream_server.routing.handoff import AlwaysHandOff, HandoffDecider
from millstream_server.routing.model_workers import ModelWorkers, no_worker, workers_of
from millstream_server.routing.plan import Plan, PlannedEncoding, PlannedLeg
from millstream_server.routing.policy import Policy
from millstream_server.routing.request import RoutingRequest
from millstream_server.routing.task_workers import TaskWorkers, known, task_workers_of
from millstream_server.routing.tasks import Task, tasks_of
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import WorkerLostError


class Router:
    """Keeps the views of all workers. All calls come from one event loop.

    The owner of the views calls `add`, `remove`, and `changed` after a view's description changed.
    """

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        handoff: HandoffDecider | None = None,
        *,
        concurrent_legs: bool = True,
    ) -> None:
        """Start without workers; each role of a model has its own policy.

        ``concurrent_legs`` False: for engines that start decode only after prefill has ended.
        """
        self._make_policy = make_policy
        self._handoff = handoff or AlwaysHandOff()
        self._concurrent = concurrent_legs
        self._views: list[WorkerView] = []
        self._models: dict[str, ModelWorkers] = {}
        """Cache, emptied when a worker is added, removed or changed."""
        self._task_workers: dict[str, TaskWorkers] = {}
        """Likewise."""
        self._policies: dict[str, dict[Role, Policy]] = {}
        """By model and role; kept when workers change."""
        self._plans: dict[tuple[WorkerView, ...], Plan] = {}
        self._watchers: list[Callable[[], None]] = []

    # ---- workers come and go ---------------------------------------------------------------------

    def add(self, view: WorkerView) -> None:
        """Add a worker."""
        self._views.append(view)
        self.changed()

    def remove(self, view: WorkerView) -> None:
        """Remove a worker."""
        self._views.remove(view)
        self.changed()

    def changed(self) -> None:
        """Recompute: a view's description changed."""
        self._models.clear()
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
                model, self._views, self._policies_of(model)
            )
        return found

    def ready(self, model: str) -> bool:
        """Return whether there is a worker of every role that a request needs."""
        return self._of(model).ready or bool(self.task_workers(model).views)

    def runs_in(self, model: str, role: Role) -> bool:
        """Return whether whole requests for a model run on workers of ``role``."""
        whole = self._of(model).aggregated
        return bool(whole.views) and whole.role is role

    def capacity(self, model: str) -> int:
        """Count the requests that a model's workers run at once; 0 when a needed role is missing.

        A draining worker counts with the requests it still runs, since those use no capacity of the
        others. Cancelled requests there don't count, even if the worker never ends them.
        """
        return self._of(model).capacity + self.task_workers(model).capacity

    def limits(self, model: str) -> GeneratorInfo | None:
        """Return the engine limits for a model's requests; None without workers."""
        return self._of(model).limits

    def require(self, model: str) -> None:
        """Check that a request can be routed now.

        Raises:
            NoWorkerError: a role that it needs has no worker.
        """
        self._of(model).require()

    # ---- one request -----------------------------------------------------------------------------

    def plan(self, request: RoutingRequest) -> Plan:
        """Pick the workers for a request: prefill and decode, or one that runs all of it.

        Raises:
            NoWorkerError: a role that it needs has no worker.
        """
        workers = self._models.get(request.model) or self._of(request.model)
        if not workers.ready:
            workers.require()
        hands_off = workers.hands_off
        if hands_off is None:
            hands_off = not request.media_at and self._handoff.hands_off(request)
        if request.media_at:
            picked: tuple[WorkerView, ...] = (_holder(workers, request.media_at),)
        elif not hands_off:
            picked = (workers.aggregated.pick(request),)
        else:
            picked = (workers.prefill.pick(request), workers.decode.pick(request))
        return self._plans.get(picked) or self._plan_of(picked)

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
                return PlannedEncoding(_holder(workers, request.media_at), own=True)
            able = [view for view in workers.encoders if view.address not in avoid]
            view = workers.aggregated.policy.pick(request, able)
        else:
            view = pick_encoder(sha256, workers.encoders, avoid)
        if view is None:
            raise no_worker(Role.ENCODE, "is connected")
        return PlannedEncoding(view, own=workers.encodes_for_itself)

    def _plan_of(self, picked: tuple[WorkerView, ...]) -> Plan:
        roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE)
        if len(picked) == 1:
            (worker,) = picked
            roles = (worker.description.role if worker.description else Role.AGGREGATED,)
        legs = tuple(PlannedLeg(role, view) for role, view in zip(roles, picked, strict=True))
        plan = self._plans[picked] = Plan(legs, concurrent=self._concurrent)
        return plan

    def _of(self, model: str) -> ModelWorkers:
        """Return a served model's workers; computed once per change."""
        workers = self._models.get(model)
        if workers is None:
            policies = self._policies_of(model)
            workers = workers_of(model, self._views, policies, handoff=self._handoff.constant)
            self._models[model] = workers
        return workers

    def _policies_of(self, model: str) -> dict[Role, Policy]:
        policies = self._policies.get(model)
        if policies is None:
            policies = self._policies[model] = {role: self._make_policy() for role in Role}
        return policies


def _holder(workers: ModelWorkers, address: str) -> WorkerView:
    for view in workers.aggregated.views:
        if view.address == address:
            return view
    raise WorkerLostError("the worker that holds this request's media went away; send it again")
