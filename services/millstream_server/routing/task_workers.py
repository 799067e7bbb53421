"""One model's workers that run whole requests for images, videos, vectors or scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from millstream_server.control.engine import WHOLE_TASKS, EngineInfo, Role, Task
from millstream_server.routing.candidates import Absences
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import RoutingPolicy, requests_at
from millstream_server.routing.workers import WorkerView, known
from millstream_server.runtime.errors import NoWorkerError


@dataclass(frozen=True, slots=True)
class TaskWorkers:
    """A model's workers of these kinds; made again when one is added, removed or changed."""

    views: Sequence[WorkerView]
    """Those that accept requests, in order of address."""
    leaving: Sequence[WorkerView]
    """Those that drain or aren't usable now."""
    policies: Mapping[Role, RoutingPolicy]
    absent: Callable[..., NoWorkerError]
    """Makes the error that there is no worker of some roles."""

    @property
    def capacity(self) -> int:
        """Requests that can run at once, plus those on draining workers; 0 without workers."""
        running = sum(
            v.description.engine.max_running_requests for v in self.views if v.description
        )
        return running and running + sum(view.in_use for view in self.leaving)

    @property
    def infos(self) -> list[EngineInfo]:
        return [view.description.engine for view in self.views if view.description]

    @property
    def outstanding(self) -> int:
        """Requests that the workers run and queue, other Processors' included."""
        return sum(requests_at(view) for view in self.views)

    @property
    def connected(self) -> dict[Role, int]:
        roles = [view.description.role for view in self.views if view.description]
        return {role: roles.count(role) for role in roles}

    def engines(self, task: Task) -> list[EngineInfo]:
        """Return what each worker of a task says about its engine.

        Raises:
            NoWorkerError: there is none.
        """
        found = [view.description.engine for view in self._of(task) if view.description]
        if not found:
            raise self.absent(WHOLE_TASKS[task])
        return found

    def pick(
        self, request: RoutingRequest, task: Task, able: Callable[[EngineInfo], bool]
    ) -> tuple[str, EngineInfo]:
        """Pick a worker by the policy, among those whose engine is ``able`` to run the request.

        Return its address, and its engine's info.

        Raises:
            NoWorkerError: there is none.
        """
        role, views = WHOLE_TASKS[task], self._of(task)
        fit = [
            view
            for view in views
            if view.description
            and view.address not in request.avoid
            and able(view.description.engine)
        ]
        place = self.policies[role].pick(request, fit)
        if place is None or place.worker.description is None:
            if not views:
                raise self.absent(role)
            raise NoWorkerError(
                f"no {role.value} worker for this model can take this request; retry in a moment",
                retry_delay_s=1.0,
            )
        return place.address, place.worker.description.engine

    def _of(self, task: Task) -> list[WorkerView]:
        return [v for v in self.views if v.description and task in v.description.tasks]


def task_workers_of(
    model: str,
    views: Iterable[WorkerView],
    policies: Mapping[Role, RoutingPolicy],
    absences: Absences,
) -> TaskWorkers:
    """Collect a model's workers."""
    of_model = [
        view
        for view in sorted(views, key=lambda view: view.address)
        if (of := known(view)) and of.model == model and not WHOLE_TASKS.keys().isdisjoint(of.tasks)
    ]
    return TaskWorkers(
        views=[view for view in of_model if view.description],
        leaving=[view for view in of_model if not view.description],
        policies=policies,
        absent=functools.partial(absences.error, model),
    )
