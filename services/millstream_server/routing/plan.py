"""The plan for one request: which workers run which part."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream_server.engines.base import Role
from millstream_server.routing.workers import Candidate, WorkerView


@dataclass(frozen=True, slots=True)
class PlannedLeg:
    """One worker's part: all of it (AGGREGATED, DIFFUSION), the prompt (PREFILL) or the tokens."""

    role: Role
    place: Candidate
    cached_tokens: int = 0
    """Tokens of the prompt that are probably in the KV cache there; 0 for the tokens' leg."""
    worker: WorkerView = field(init=False, compare=False)
    """The worker that runs it."""
    dp_rank: int | None = field(init=False, compare=False)
    """The data-parallel rank, as in `GenerationRequest.dp_rank`; None: there is one."""

    def __post_init__(self) -> None:
        """Set what each request of a plan reads."""
        object.__setattr__(self, "worker", self.place.worker)
        object.__setattr__(self, "dp_rank", self.place.dp_rank)


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
    places: tuple[str, ...] = field(init=False, compare=False)
    """Where the legs run: `RoutingRequest.session` of the conversation's next turn."""

    def __post_init__(self) -> None:
        """Set `places`."""
        object.__setattr__(self, "places", tuple(leg.place.name for leg in self.legs))
