"""Routes requests to workers: keeps their views, computes capacity, plans requests."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from millstream_server.control.engine import Role, Task
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.sampling import Ability
from millstream_server.generation.validation import check_adapter
from millstream_server.routing.candidates import Absences
from millstream_server.routing.model_workers import ModelWorkers, adapters_of, workers_of
from millstream_server.routing.pairs import shared_transfer
from millstream_server.routing.plan import (
    Handoff,
    Plan,
    PlannedLeg,
    RoutingRequest,
    Weights,
    weights_of,
)
from millstream_server.routing.policy import RoutingPolicy
from millstream_server.routing.prefix.prefixes import Prefixes
from millstream_server.routing.task_workers import TaskWorkers, task_workers_of
from millstream_server.routing.workers import Candidate, WorkerView, info_of, known
from millstream_server.runtime.errors import NoWorkerError

FoundT = TypeVar("FoundT")


class Router:
    """Keeps the views of all workers. All calls come from one event loop.

    The owner of the views calls `add`, `remove`, and `changed` after a view's description changed.
    """

    def __init__(
        self,
        make_policy: Callable[[], RoutingPolicy],
        handoff: Handoff | None = None,
        prefixes: Prefixes | None = None,
        round_s: float = 0.0,
    ) -> None:
        """Start without workers; each role of a model has its own policy.

        ``prefixes``: what the workers cache, for policies and hand-offs; every worker is admitted
        to it. ``round_s``: see `Absences`.
        """
        self._handoff = handoff or Handoff()
        self.prefixes = prefixes
        """What workers cache; links feed it. None: nothing decides by it."""
        self._views: list[WorkerView] = []
        # Caches, emptied when a worker is added, removed or changed.
        self._models: dict[str, ModelWorkers] = {}
        self._task_workers: dict[str, TaskWorkers] = {}
        self._adapters: dict[tuple[str, str], ModelWorkers] = {}
        """By model and adapter: the workers that have the adapter."""
        self._policies: dict[str, dict[Role, RoutingPolicy]] = collections.defaultdict(
            lambda: {role: make_policy() for role in Role}
        )
        """By model and role; kept when workers change."""
        self._watchers: list[Callable[[], None]] = []
        self._absences = Absences(round_s=round_s)
        self._change = asyncio.Event()
        """Set at the next change; each has its own."""

    # ---- workers come and go ---------------------------------------------------------------------

    def add(self, view: WorkerView) -> None:
        self._views.append(view)
        self.changed()

    def remove(self, view: WorkerView) -> None:
        self._views.remove(view)
        if self.prefixes:
            self.prefixes.dismiss(view)
        self.changed()

    def changed(self) -> None:
        accepting = (view.description for view in self._views)
        self._absences.changed({(found.model, found.role) for found in accepting if found})
        self._models.clear()
        self._adapters.clear()
        self._task_workers.clear()
        for callback in self._watchers:
            callback()
        self._change.set()
        self._change = asyncio.Event()

    async def found(self, look: Callable[[], FoundT]) -> FoundT:
        """Return what ``look`` does, or raise what it raises.

        After the last worker of a role has left it is called again at each change, for a round of
        discovery.
        """
        while True:
            try:
                return look()
            except NoWorkerError as error:
                if error.may_come_s <= 0:
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(error.may_come_s):
                        await self._change.wait()

    def watch(self, callback: Callable[[], None]) -> None:
        self._watchers.append(callback)

    # ---- what a model's workers can take ---------------------------------------------------------

    def connected(self, model: str) -> dict[Role, int]:
        return self.of(model).connected | self.task_workers(model).connected

    def tasks(self, model: str) -> frozenset[Task]:
        """Return what a model's workers do; workers that accept no requests now count too."""
        found = [known(view) for view in self._views]
        return frozenset().union(*(d.tasks for d in found if d and d.model == model))

    def task_workers(self, model: str) -> TaskWorkers:
        if (found := self._task_workers.get(model)) is None:
            found = self._task_workers[model] = task_workers_of(
                model, self._views, self._policies[model], self._absences
            )
        return found

    def ready(self, model: str) -> bool:
        return self.of(model).ready or bool(self.task_workers(model).views)

    def runs_in(self, model: str, role: Role) -> bool:
        """Return whether whole requests for a model run on workers of ``role``."""
        whole = self.of(model).aggregated
        return bool(whole.views) and whole.role is role

    def capacity(self, model: str) -> int:
        """Count the requests that a model's workers run at once; 0 when a needed role is missing.

        A draining worker counts with the requests it still runs, since those use no capacity of the
        others. Cancelled requests there don't count, even if the worker never ends them.
        """
        workers = self.of(model)
        capacity = workers.running
        if capacity and workers.leaving:
            capacity += sum(view.in_use for view in workers.leaving)
        whole = self.task_workers(model)
        return capacity + whole.capacity if whole.views else capacity

    def require(self, model: str) -> None:
        """Check that a request can be routed now; see `ModelWorkers.require`."""
        self.of(model).require()

    # ---- one request -----------------------------------------------------------------------------

    def plan(self, request: RoutingRequest) -> Plan:
        """Pick the workers for a request: prefill and decode, or one that runs all of it.

        Raises:
            NoWorkerError: a role that it needs has no worker.
            AdapterNotFoundError: no worker has its LoRA adapter.
        """
        if request.weights is not None:
            workers = self._with_weights(request, request.weights)
        else:
            workers = self.of(request.model)
            workers.require()
            if request.adapter:
                workers = self._with_adapter(request, workers)
        whole = workers.aggregated
        if request.media_at:
            place = workers.holder(request)
        elif workers.hands_off:
            return self._handed_off(request, workers)
        else:
            place = whole.pick(request)
            if workers.hands_off is None and workers.too_long_for_one(
                self._uncached(request, place), self._handoff.min_tokens
            ):
                return self._handed_off(request, workers)
        leg = PlannedLeg(whole.role, place, self._sent(request, place))
        return Plan((leg,), (place.name,))

    def _handed_off(self, request: RoutingRequest, workers: ModelWorkers) -> Plan:
        prompt = workers.prefill.pick(request)
        tokens = workers.decode_for(prompt).pick(request)
        first = PlannedLeg(Role.PREFILL, prompt, self._sent(request, prompt))
        legs = first, PlannedLeg(Role.DECODE, tokens)
        return Plan(legs, (prompt.name, tokens.name), shared_transfer(prompt, tokens))

    def _sent(self, request: RoutingRequest, place: Candidate) -> int:
        """Note that a prompt goes to a place; return how much of it is probably cached there."""
        return self.prefixes.of(request.model).sent(request, place) if self.prefixes else 0

    def _uncached(self, request: RoutingRequest, place: Candidate) -> int:
        prefixes = self.prefixes
        cached = prefixes.of(request.model).overlaps(request).tokens(place) if prefixes else 0
        return len(request.token_ids) - cached

    def of(self, model: str) -> ModelWorkers:
        """Return a served model's workers; computed once per change."""
        if (workers := self._models.get(model)) is None:
            workers = self._models[model] = self._collect(model, self._views)
        return workers

    def _with_adapter(self, request: RoutingRequest, workers: ModelWorkers) -> ModelWorkers:
        model, adapter = request.model, request.adapter
        able = self._adapters.get((model, adapter))
        if able is None:
            if workers.limits:
                check_adapter(adapter, workers.limits)
            views = [view for view in self._views if adapter in adapters_of(view)]
            able = self._collect(model, views)
            if not (able.ready or able.unpaired):
                raise NoWorkerError(
                    f"the workers that have the LoRA adapter {adapter} accept no requests now; "
                    "retry in a moment",
                    retry_delay_s=1.0,
                )
            able.require()
            self._adapters[model, adapter] = able
        return able

    def _with_weights(self, request: RoutingRequest, weights: Weights) -> ModelWorkers:
        """Return the workers where a request can go on; not kept: few ask."""
        views = [
            view
            for view in self._views
            if view.address not in request.avoid
            and weights_of(view) == weights
            and (not request.resumes or _resumes(view))
            and (not request.adapter or request.adapter in adapters_of(view))
        ]
        able = self._collect(request.model, views)
        able.require()
        return able

    def _collect(self, model: str, views: Sequence[WorkerView]) -> ModelWorkers:
        if self.prefixes:
            for view in views:
                if view.description:
                    self.prefixes.admit(view, view.description)
        return workers_of(
            model,
            views,
            self._policies[model],
            handoff=self._handoff.constant,
            absences=self._absences,
        )


def _resumes(view: WorkerView) -> bool:
    engine = info_of(view.description, GeneratorInfo)
    return engine is not None and Ability.RESUMED_OUTPUT in engine.abilities
