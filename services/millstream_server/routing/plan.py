"""What routing gets of a request, and the plan that it makes: which workers run which part."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

from millstream_server.control.engine import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.ticket import KvTransfer
from millstream_server.routing.workers import Candidate, WorkerView, info_of, known
from millstream_server.runtime.frozen import dataclass
from millstream_server.runtime.priority import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """A request to be routed."""

    model: str
    token_ids: Sequence[int] = ()
    """The prompt."""
    media_start: int | None = None
    """Position of the prompt's first placeholder of an image or a video: from its block on, what is
    cached can't be told from token ids. None: there is none."""
    session: tuple[str, ...] = ()
    """Where the conversation's last turn ran (`Plan.places`)."""
    media_at: str = ""
    """Address of the aggregated worker that holds the request's media as pixels; empty: any worker
    may run it."""
    session_key: str = ""
    """The client's key: requests with the same one go to the same worker; empty: no preference."""
    adapter: str = ""
    """Name of the LoRA adapter; empty: the base model."""
    cache_salt: str = ""
    """Separates KV caches, as `GenerationRequest.cache_salt`."""
    priority: Priority = Priority.NORMAL
    avoid: Collection[str] = ()
    """Addresses of workers that it must not go to."""
    weights: Weights | None = None
    """Only workers with these take it, since it goes on there; None: any of the model."""
    resumes: bool = False
    """With ``weights``: only workers that can be told which of its tokens were output."""


class Weights(NamedTuple):
    """What two workers must have in common for one to go on with the other's request."""

    version: str
    model_hash: str
    engine: str


def weights_of(view: WorkerView) -> Weights | None:
    """Return a worker's, the last ones while it accepts no requests; None: it makes no text."""
    engine = info_of(known(view), GeneratorInfo)
    return Weights(engine.weight_version, engine.model_hash, engine.engine) if engine else None


class HandoffMode(enum.Enum):
    """When to hand off, by the names in settings; AUTO: decided for each request."""

    ALWAYS = "always"
    NEVER = "never"
    AUTO = "auto"


DEFAULT_MIN_TOKENS = 512
"""Prompt tokens that an engine computes within about one step of its running answers."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """Whether requests are handed off where a model has prefill, decode and aggregated workers.

    Where a model's workers allow only one of the two ways, it doesn't count.
    """

    mode: HandoffMode = HandoffMode.ALWAYS
    min_tokens: int = DEFAULT_MIN_TOKENS
    """For AUTO: see `ModelWorkers.too_long_for_one`."""

    @property
    def constant(self) -> bool | None:
        """The decision if it is the same for every request; else None.

        Workers that are then never used don't count for capacity or readiness.
        """
        return None if self.mode is HandoffMode.AUTO else self.mode is HandoffMode.ALWAYS


@dataclass(frozen=True, slots=True)
class PlannedLeg:
    """One worker's part: all of it (AGGREGATED, DIFFUSION), the prompt (PREFILL) or the tokens."""

    role: Role
    place: Candidate
    cached_tokens: int = 0
    """Tokens of the prompt that are probably in the KV cache there; 0 for the tokens' leg."""


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
    places: tuple[str, ...] = ()
    """Where they run: `RoutingRequest.session` of the conversation's next turn."""
    transfer: KvTransfer | None = None
    """The prefill worker's, if both workers name a kind; None: a ticket without engine data."""
