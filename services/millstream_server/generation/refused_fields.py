"""Fields of a request that an engine would ignore silently, or that would end it: they are refused.

An engine names them in `GeneratorInfo.refused_fields`, by their paths in StartGeneration. Here is
which of them a request sets.

A knob counts as set when its value isn't neutral: an unset knob and a neutral one ask for the same.
A temperature of 0 isn't refused either: it asks for greedy decoding, and an engine that has no
temperature decodes greedily.
"""

from __future__ import annotations

from collections.abc import Iterator

from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import KNOBS
from millstream_server.runtime.errors import FieldViolation

_GREEDY = {"temperature": 0.0}
_KEPT_IN_DIFFUSION = {"ignore_eos"}

REFUSED_IN_DIFFUSION = frozenset(
    {
        *(f"sampling.{knob.name}" for knob in KNOBS if knob.name not in _KEPT_IN_DIFFUSION),
        "sampling.logit_bias",
        "sampling.constraint",
        "logprobs",
        "ticket",
        "adapter",
        "cache_salt",
    }
)
"""What a diffusion language model has no use for: it takes the likeliest tokens of a block, those
that it is sure of first. What is left: the lengths, the stop tokens and `ignore_eos`."""

_WHY = "this model's engine can't use it; leave it out"


def refused_violations(
    request: GenerationRequest, refused: frozenset[str], at: str
) -> Iterator[FieldViolation]:
    """Yield the fields in ``refused`` that a request sets; ``at`` is the options' path."""
    for field in sorted(refused.intersection(_set_fields(request))):
        path = field if field == "ticket" else at + field
        yield FieldViolation(path, _advice(field))


def _advice(field: str) -> str:
    if field == "sampling.temperature":
        return "this model decodes greedily; leave it out, or set it to 0"
    return _WHY


def _set_fields(request: GenerationRequest) -> Iterator[str]:
    sampling = request.sampling
    for knob in KNOBS:
        value = getattr(sampling, knob.name)
        if value not in (knob.neutral, _GREEDY.get(knob.name, knob.neutral)):
            yield f"sampling.{knob.name}"
    if sampling.logit_bias:
        yield "sampling.logit_bias"
    if sampling.constraint is not None:
        yield "sampling.constraint"
    if request.logprobs is not None:
        yield "logprobs"
    if request.adapter:
        yield "adapter"
    if request.cache_salt:
        yield "cache_salt"
    if request.ticket is not None:
        yield "ticket"
