"""A generation's knobs, as keywords and as a table, and their conversion to options.

They are the contract's fields of ``GenerationOptions`` and ``SamplingParams``. The typed keywords
below repeat the names for type checkers; a test compares them with the contract.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from millstream.v1 import processor_pb2, sampling_pb2

if TYPE_CHECKING:
    from typing import Unpack


class Sampling(TypedDict, total=False):
    """The fields of ``millstream.v1.SamplingParams``."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int
    logit_bias: Mapping[int, float]
    constraint: sampling_pb2.Constraint
    seed_best_effort: bool


class Knobs(Sampling, total=False):
    """The fields of ``millstream.v1.GenerationOptions``, and of its sampling."""

    sampling: sampling_pb2.SamplingParams
    """All sampling knobs at once; single keywords override it."""
    stop: str | Sequence[str]
    n: int
    logprobs: sampling_pb2.LogprobOptions
    min_interval_s: float
    """The contract's ``min_interval``, in seconds."""
    return_token_ids: bool
    include_special_tokens: bool
    priority: processor_pb2.RequestPriority.ValueType
    adapter: str
    session: str
    cache_salt: str


_SAMPLING = sampling_pb2.SamplingParams.DESCRIPTOR
_OPTIONS = processor_pb2.GenerationOptions.DESCRIPTOR


def generation_options(**knobs: Unpack[Knobs]) -> processor_pb2.GenerationOptions:
    """Make a generation's options; knobs left out are unset, for the server's defaults.

    Raises:
        TypeError: an unknown knob, or a value of the wrong type.
        ValueError: a value that doesn't fit its field.
    """
    named: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for name, value in knobs.items():
        if name in _SAMPLING.fields_by_name:
            named[name] = value
        elif name == "min_interval_s":
            fields["min_interval"] = timedelta(seconds=knobs["min_interval_s"])
        elif name in _OPTIONS.fields_by_name and name != "min_interval":
            fields[name] = [value] if name == "stop" and isinstance(value, str) else value
        else:
            raise TypeError(f"{name!r} is no option of a generation{_advice(name)}")
    options = processor_pb2.GenerationOptions(**fields)
    for name in named:
        options.sampling.ClearField(name)  # type: ignore[arg-type]  # it is a field's name
    if named:
        options.sampling.MergeFrom(sampling_pb2.SamplingParams(**named))
    return options


def check_names(knobs: Mapping[str, object], kind: Any, of: str) -> None:
    """Refuse names that a TypedDict of knobs hasn't.

    Raises:
        TypeError: there is one.
    """
    if unknown := knobs.keys() - kind.__annotations__.keys():
        raise TypeError(f"{min(unknown)!r} is no option of {of}")


_ELSEWHERE = {
    "max_tokens": "write max_new_tokens=",
    "max_completion_tokens": "write max_new_tokens=",
    "stream": "answers always stream; .answer() waits for the whole",
    "timeout": "write timeout_s=",
    "user": "write session=, or request_id=",
    "prompt_cache_key": "write session=",
    "extra_body": "write its options themselves",
    "functions": "write tools=",
    "function_call": "write tool_choice=",
    "reasoning_effort": "write reasoning=",
}
"""Options of OpenAI's API, and what to write here."""


def _advice(name: str) -> str:
    if instead := _ELSEWHERE.get(name):
        return f": {instead}"
    near = difflib.get_close_matches(name, [*Knobs.__annotations__, "min_interval_s"], 1)
    return f"; did you mean {near[0]}=?" if near else ""


@dataclass(frozen=True, slots=True)
class Knob:
    """One sampling knob with a plain value, for command lines and forms."""

    name: str
    kind: type[float | int | bool]
    largest: int
    """For an integer: the largest value of its field."""
    repeated: bool
    help: str


_HELP = {
    "temperature": "at least 0; 0 always takes the likeliest token",
    "top_p": "draw from the likeliest tokens that together have this probability, above 0 up to 1",
    "top_k": "draw from the N likeliest tokens; 0 switches it off",
    "min_p": "least probability relative to the likeliest token, from 0 to 1",
    "frequency_penalty": "penalty for each time a token occurred before, from -2 to 2",
    "presence_penalty": "penalty for a token that occurred before, from -2 to 2",
    "repetition_penalty": "divides the scores of tokens seen before, above 0 up to 2; 1 is neutral",
    "max_new_tokens": "most tokens of an answer",
    "min_new_tokens": "fewest tokens of an answer",
    "stop_token_ids": "end the answer at this token; may be repeated",
    "ignore_eos": "go on past the model's end-of-sequence token",
    "seed": "same seed, same request: same answer (if the engine can)",
    "seed_best_effort": "a seed that the workers can't keep is left out, not refused",
}

_F = FieldDescriptor
_KINDS: dict[int, tuple[type[float | int | bool], int]] = {
    _F.TYPE_FLOAT: (float, 0),
    _F.TYPE_BOOL: (bool, 0),
    _F.TYPE_UINT32: (int, 2**32 - 1),
    _F.TYPE_UINT64: (int, 2**63 - 1),  # the contract's limit for ``seed``
}

KNOBS: tuple[Knob, ...] = tuple(
    # protobuf has `is_repeated` from 6.31 on only.
    Knob(field.name, *_KINDS[field.type], field.default_value == [], _HELP.get(field.name, ""))
    for field in _SAMPLING.fields
    if field.type in _KINDS
)
"""Every sampling knob of the contract with plain values: all but ``logit_bias``, ``constraint``."""
