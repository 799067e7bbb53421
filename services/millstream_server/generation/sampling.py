"""Sampling: how the next token is drawn and when to stop.

Every knob is declared once, as a field of `Sampling`: neutral value, bounds, the engine ability it
needs, name in traces. Conversion, validation, telemetry and engine adapters iterate over `KNOBS`.
Names are those of the contract's fields (`sampling.proto`); a test compares them.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any

from millstream_server.runtime.frozen import dataclass

Check = Callable[[Any], str | None]
"""Returns what is wrong with a value, or None."""

MAX_SEED = 2**63 - 1
MAX_BIASES = 20_000
"""Tokens with a bias: each is checked, in 0.2 us."""


class Ability(enum.Enum):
    """A feature that an engine may lack, depending on the vendor and its settings."""

    SEED = "seed"
    MIN_NEW_TOKENS = "min_new_tokens"
    CONSTRAINTS = "constraints"
    LOGIT_BIAS = "logit_bias"
    PROMPT_LOGPROBS = "prompt_logprobs"
    STRUCTURAL_TAGS = "structural_tags"
    RESUMED_OUTPUT = "resumed_output"
    """`GenerationRequest.resumed_tokens`."""


class ConstraintKind(enum.Enum):
    """The grammar languages of guided decoding; the values are the contract's field names."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that the output must match."""

    kind: ConstraintKind
    source: str


@dataclass(frozen=True, slots=True)
class Knob:
    """One sampling knob that is a single number or flag."""

    name: str
    neutral: Any
    check: Check
    ability: Ability | None
    """The ability that the engine needs when the value isn't neutral."""
    attribute: str
    """Span attribute of the GenAI conventions; empty: none."""


def _knob(
    neutral: Any, check: Check, *, ability: Ability | None = None, attribute: str = ""
) -> Any:
    return field(
        default=neutral, metadata={"check": check, "ability": ability, "attribute": attribute}
    )


def _rule(holds: Callable[[Any], bool], sentence: str) -> Check:
    return lambda value: None if holds(value) else sentence


_PENALTY = _rule(lambda value: -2 <= value <= 2, "must be between -2 and 2")  # noqa: PLR2004
_REQUEST = "gen_ai.request."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. The defaults are neutral values, not a model's own."""

    max_new_tokens: int
    """At least 1; if the client sets none, what the context leaves."""
    temperature: float = _knob(
        1.0,
        _rule(lambda v: math.isfinite(v) and v >= 0, "must be a finite number, 0 or more"),
        attribute=_REQUEST + "temperature",
    )
    """0 is greedy."""
    top_p: float = _knob(
        1.0,
        _rule(lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
        attribute=_REQUEST + "top_p",
    )
    top_k: int = _knob(
        0, _rule(lambda v: v >= 0, "must be 0 (off) or more"), attribute=_REQUEST + "top_k"
    )
    """0: off."""
    min_p: float = _knob(0.0, _rule(lambda v: 0 <= v <= 1, "must be between 0 and 1"))
    frequency_penalty: float = _knob(0.0, _PENALTY, attribute=_REQUEST + "frequency_penalty")
    presence_penalty: float = _knob(0.0, _PENALTY, attribute=_REQUEST + "presence_penalty")
    repetition_penalty: float = _knob(
        1.0,
        _rule(lambda v: 0 < v <= 2, "must be above 0 and at most 2"),  # noqa: PLR2004
    )
    min_new_tokens: int = _knob(
        0, _rule(lambda v: v >= 0, "must be 0 or more"), ability=Ability.MIN_NEW_TOKENS
    )
    ignore_eos: bool = _knob(neutral=False, check=lambda _: None)
    seed: int | None = _knob(
        None,
        _rule(lambda v: -MAX_SEED - 1 <= v <= MAX_SEED, "must be below 2^63"),
        ability=Ability.SEED,
        attribute=_REQUEST + "seed",
    )
    seed_best_effort: bool = False
    """The Processor leaves out a seed that the workers can't keep; they refuse it."""
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Constraint | None = None


KNOBS: tuple[Knob, ...] = tuple(
    Knob(f.name, f.default, f.metadata["check"], f.metadata["ability"], f.metadata["attribute"])
    for f in dataclasses.fields(Sampling)
    if "check" in f.metadata
)
_SEED = next(knob for knob in KNOBS if knob.name == "seed")
_COMMON = tuple(knob for knob in KNOBS if knob is not _SEED)
_read_common = operator.attrgetter(*(knob.name for knob in _COMMON))


def new_seed() -> int:
    """Draw a seed that a client didn't choose; only logs have it."""
    return random.getrandbits(MAX_SEED.bit_length())


def given_knobs(sampling: Sampling) -> Sequence[tuple[Knob, Any]]:
    """Return the knobs that aren't neutral, with their values."""
    given = _given(_read_common(sampling))
    return given if sampling.seed is None else (*given, (_SEED, sampling.seed))


# Cached: it is asked for several times per request, and clients send the same few values often,
# but for the seed.
@lru_cache(maxsize=256)
def _given(values: tuple[Any, ...]) -> Sequence[tuple[Knob, Any]]:
    pairs = zip(_COMMON, values, strict=True)
    return tuple((knob, value) for knob, value in pairs if value != knob.neutral)
