"""How a choice that has lost its worker goes on, by what was asked of the worker: a table.

docs/guarantees.md has the same rows; a test compares.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass

from millstream_server.control.engine import Role
from millstream_server.generation.request import GenerationRequest

DRAWS_BY_POSITION = frozenset({"sglang", "simulated"})
"""Engines whose draw depends on the seed and the position alone. Others, such as vLLM, keep a
generator per request, which begins anew with a longer prompt."""


class Way(enum.Enum):
    """The values are the contract's names; in the order of what they cost."""

    CONTINUE = "CONTINUE"
    """The tokens so far become a part of the prompt: one prefill, mostly of cached tokens."""
    CONTINUE_WITH_STATE = "CONTINUE_WITH_STATE"
    """The same, and the engine is told how many of the prompt's tokens were output."""
    AGAIN = "AGAIN"
    """As it was sent first, if the client has no tokens: what came is dropped."""
    REPLAY = "REPLAY"
    """As it was sent first; tokens that came before must come again, and are not passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A choice that has lost its worker."""

    request: GenerationRequest
    role: Role
    """The lost worker's."""
    engine: str
    """Its vendor."""
    seed: int | None
    """What the worker drew by; None: by a seed of its own."""
    seed_is_clients: bool
    given: bool
    """Whether the client has tokens of it, or may have."""
    resumes: bool
    """Whether the lost worker's engine could be told which tokens were output; others then can."""
    media_held: bool
    """Whether the embeddings of its images and videos can still be fetched, from anywhere."""

    @property
    def greedy(self) -> bool:
        return self.request.sampling.temperature == 0

    @property
    def penalized(self) -> bool:
        sampling = self.request.sampling
        return bool(
            sampling.frequency_penalty
            or sampling.presence_penalty
            or sampling.repetition_penalty != 1
        )

    @property
    def seed_lost(self) -> bool:
        """Whether a client's seed has no effect on a continued prompt."""
        return self.seed_is_clients and not self.greedy and self.engine not in DRAWS_BY_POSITION


@dataclass(frozen=True, slots=True)
class Row:
    """What limits the ways; a request without any such feature may take each."""

    feature: str
    holds: Callable[[Lost], bool]
    ways: frozenset[Way]
    """The ways that are right with it."""


_CONTINUED = frozenset({Way.CONTINUE, Way.CONTINUE_WITH_STATE})
_FROM_THE_PROMPT = frozenset({Way.AGAIN, Way.REPLAY})
_STATE = frozenset({Way.CONTINUE_WITH_STATE})
ROWS = (
    Row("tokens were given to the client", lambda it: it.given, _CONTINUED | {Way.REPLAY}),
    Row(
        "an engine that can't be told what was output",
        lambda it: not it.resumes,
        _FROM_THE_PROMPT | {Way.CONTINUE},
    ),
    Row(
        "sampled without a seed",
        lambda it: it.seed is None and not it.greedy,
        _CONTINUED | {Way.AGAIN},
    ),
    Row("a client's seed, on vLLM", lambda it: it.seed_lost, _FROM_THE_PROMPT),
    Row(
        "structured output",
        lambda it: it.request.sampling.constraint is not None,
        _FROM_THE_PROMPT | _STATE,
    ),
    Row("penalties", lambda it: it.penalized, _FROM_THE_PROMPT | _STATE),
    Row("logprobs", lambda it: it.request.logprobs is not None, _FROM_THE_PROMPT),
    Row(
        "images and videos",
        lambda it: bool(it.request.prompt.media) and not it.media_held,
        frozenset(),
    ),
    Row("text diffusion", lambda it: it.role is Role.DIFFUSION, frozenset({Way.AGAIN})),
)


def way_of(lost: Lost) -> Way | None:
    """Return the cheapest way that is right for all that was asked; None: there is none."""
    ways: Collection[Way] = frozenset(Way).intersection(
        *(row.ways for row in ROWS if row.holds(lost))
    )
    return next((way for way in Way if way in ways), None)
