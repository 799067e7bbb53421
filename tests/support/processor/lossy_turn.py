"""A turn that loses its worker, with others behind, on workers that the test plays itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.processor.losses import RepeatedLosses
from millstream_server.processor.redispatch import Redispatcher
from millstream_server.processor.redispatch_ways import Way
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.plan import Plan, PlannedLeg, RoutingRequest
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import (
    NoWorkerError,
    ServingError,
    WorkerLostError,
)
from tests.support.processor.played_turn import (
    ALONE,
    Started,
    make_parts,
    make_view,
    start_turn,
)

GONE = WorkerLostError("gone")
OTHER, THIRD = make_view("other", Role.DECODE), make_view("third", Role.DECODE)
REGEX = Constraint(ConstraintKind.REGEX, "[a-z]+")


@dataclass
class Routes:
    """Stands where a router would: other workers, in order, until there is none left."""

    plans: list[Plan] = field(default_factory=lambda: [on(OTHER), on(THIRD)])
    asked: list[RoutingRequest] = field(default_factory=list)

    def plan(self, request: RoutingRequest) -> Plan:
        self.asked.append(request)
        if not self.plans:
            raise NoWorkerError("none")
        return self.plans.pop(0)


def on(view: WorkerView, role: Role = Role.AGGREGATED) -> Plan:
    return Plan((PlannedLeg(role, view),), (view.address,))


@dataclass
class Lossy:
    """A turn with a first worker, and others behind."""

    it: Started
    routes: Routes

    def lose(self, tokens: Sequence[int] = (), error: ServingError = GONE) -> None:
        """Have the first worker send tokens and fail."""
        sink = self.it.workers.sinks["decode"][0]
        if tokens:
            sink.emit(list(tokens))
        sink.fail(error)

    @property
    def ways(self) -> list[tuple[int, Way]]:
        return [(each.tokens, each.way) for each in self.it.turn.redispatches]

    def asked(self, address: str = "other") -> Any:
        (request,) = self.it.workers.asked[address]
        return request

    def sink(self, address: str = "other") -> Any:
        return self.it.workers.sinks[address][-1]

    @property
    def ids(self) -> list[int]:
        return list(self.it.turn.choices[0].received)


def lossy(
    text_model: TextModel,
    plan: Plan = ALONE,
    *,
    plans: Sequence[Plan] | None = None,
    running: int = 0,
    redispatch: Redispatcher | None = None,
    **turn: Any,
) -> Lossy:
    """Start a turn; ``redispatch``: another turn's, whose plans it then has."""
    routes = Routes() if plans is None else Routes(list(plans))
    redispatch = redispatch or Redispatcher(routes.plan, lambda: running, RepeatedLosses())
    parts = replace(make_parts(), redispatch=redispatch)
    return Lossy(start_turn(text_model, plan, parts=parts, **turn), routes)
