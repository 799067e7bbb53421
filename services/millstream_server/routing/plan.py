"""The plan for one request: which workers run which part."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.engines.base import Role
from millstream_server.routing.workers import WorkerView


@dataclass(frozen=True, slots=True)
class PlannedLeg:
    """One worker's part: all of it (AGGREGATED, DIFFUSION), the prompt (PREFILL) or the tokens."""

    role: Role
    worker: WorkerView


@dataclass(frozen=True, slots=True)
class PlannedEncoding:
    """The worker that encodes one image or video of a request."""

    worker: WorkerView
    own: bool = False
    """Whether the result is only of use on that worker, which runs the request too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The legs of a request: one that runs all of it, or PREFILL and then DECODE."""

    legs: tuple[PlannedLeg, ...]
    concurrent: bool = True
    """True: start all legs at once. False: each leg only after the one before has succeeded."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The workers' addresses: `RoutingRequest.session` of the conversation's next turn."""
        return tuple(leg.worker.address for leg in self.legs)
