"""Checks whether an engine can serve a request, before it is submitted.

Some checks protect all requests: a token id outside the vocabulary crashes SGLang.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.grammar_shapes import max_bytes, shape_problem
from millstream_server.generation.media_checks import (
    media_violations,
    missing_modalities,
)
from millstream_server.generation.request import GenerationRequest, LogprobOptions
from millstream_server.generation.sampling import (
    KNOBS,
    Ability,
    Constraint,
    ConstraintKind,
    Knob,
    Sampling,
    given_knobs,
)
from millstream_server.generation.ticket import MAX_ENGINE_DATA_BYTES, EngineData, KvTransfer
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    FieldViolation,
    InvalidRequestError,
    UnsupportedFeatureError,
)

MAX_LOGIT_BIAS = 100.0
MAX_ROOM = 2**63 - 1
MAX_NAMED = 16
"""Most names in one error."""
MAX_SALT_BYTES = 128
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_VIOLATIONS = 16
"""Most violations in one error: they are sent in trailers, which are limited to about 8 KiB."""

_ABILITY_SETTINGS: Mapping[Ability, str] = {
    Ability.SEED: "deterministic",
    Ability.MIN_NEW_TOKENS: "engine_tokenizer",
    Ability.CONSTRAINTS: "engine_tokenizer",
}

_GREEDY = {"temperature": 0.0}
"""Asks for greedy decoding, which is what an engine without a temperature does."""
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


@dataclass(frozen=True, slots=True)
class FieldPaths:
    """The paths of the request's parts in the client's message, for violations.

    The defaults are for a worker's `StartGeneration`.
    """

    prompt: str = "token_ids"
    options: str = ""
    """Path of the message with `sampling` and `logprobs`, with a dot at the end; may be empty."""
    request_id: str = "request_id"
    prompt_is_ids: bool = True
    """Whether the client sent the prompt as ids: a wrong one is then named by its index."""


_OF_A_WORKER = FieldPaths()


def check_request(
    request: GenerationRequest, info: GeneratorInfo, role: Role, paths: FieldPaths = _OF_A_WORKER
) -> None:
    """Raise if the request can't be served, naming all wrong fields by their paths.

    Raises:
        InvalidRequestError: a value is out of range, whatever the worker's settings.
        UnsupportedFeatureError: values are valid, but this worker lacks an ability, or its engine
            would ignore them.
        AdapterNotFoundError: its LoRA adapter isn't loaded.
    """
    knobs = given_knobs(request.sampling)
    if violations := _violations(request, knobs, info, role, paths):
        raise InvalidRequestError.of_all(violations[:MAX_VIOLATIONS])
    at = paths.options
    missing = _missing_abilities(request, knobs, info, at)
    if info.refused_fields:
        missing += _refused(request, knobs, info, at)
    if request.prompt.media:
        missing += missing_modalities(request.prompt.media, info.media)
    if missing:
        raise UnsupportedFeatureError.of_all(missing[:MAX_VIOLATIONS])
    if request.adapter:
        check_adapter(request.adapter, info, at)


def _violations(
    request: GenerationRequest,
    knobs: Sequence[tuple[Knob, Any]],
    info: GeneratorInfo,
    role: Role,
    paths: FieldPaths,
) -> list[FieldViolation]:
    """Return the values that are out of range; looks only at what the request has."""
    at, sampling = paths.options, request.sampling
    found = [*_prompt(request, info, paths), *_knobs(knobs, at), *_lengths(sampling, at)]
    if sampling.stop_token_ids or sampling.logit_bias:
        found += itertools.islice(_named_tokens(sampling, info.vocab_size, at), MAX_VIOLATIONS)
    if sampling.constraint:
        found += check_constraint(sampling.constraint, at)
    if request.logprobs:
        found += _logprobs(request.logprobs, at)
    if request.ticket is not None or role.hands_off:
        found += _ticket(request, info, role)
    if request.dp_rank is not None or request.cache_salt or request.ticket is not None:
        found += _placement(request, info, role, at)
    if info.media and len(request.token_ids) <= info.context_length:
        media = media_violations(request, info, role)
        found += itertools.islice(media, MAX_VIOLATIONS)
    return found


def _prompt(
    request: GenerationRequest, info: GeneratorInfo, paths: FieldPaths
) -> list[FieldViolation]:
    token_ids, max_new_tokens = request.prompt.token_ids, request.sampling.max_new_tokens
    if not token_ids:
        return [FieldViolation(paths.prompt, "must not be empty")]
    found = []
    if request.resumed_tokens >= len(token_ids):
        found.append(FieldViolation("resumed_tokens", "must be fewer than the prompt's tokens"))
    if len(token_ids) + max(max_new_tokens, 1) > info.context_length:
        # Name the field that must be reduced.
        too_long = len(token_ids) >= info.context_length
        found.append(
            FieldViolation(
                paths.prompt if too_long else f"{paths.options}sampling.max_new_tokens",
                f"{len(token_ids)} prompt tokens and max_new_tokens {max_new_tokens} exceed "
                f"the context length of {info.context_length} tokens",
            )
        )
    if len(token_ids) > info.context_length:
        return found  # none is looked at
    # `min` and `max` run in C; the slow search is for bad prompts only.
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        index, token = next(
            (index, token)
            for index, token in enumerate(token_ids)
            if not 0 <= token < info.vocab_size
        )
        found.append(
            FieldViolation(
                f"{paths.prompt}[{index}]" if paths.prompt_is_ids else paths.prompt,
                f"{token} is not in the vocabulary (0 to {info.vocab_size - 1})",
            )
        )
    return found


def _knobs(knobs: Sequence[tuple[Knob, Any]], at: str) -> list[FieldViolation]:
    return [
        FieldViolation(f"{at}sampling.{knob.name}", problem)
        for knob, value in knobs
        if (problem := knob.check(value))
    ]


def _lengths(sampling: Sampling, at: str) -> list[FieldViolation]:
    found = []
    if sampling.max_new_tokens < 1:
        found.append(FieldViolation(f"{at}sampling.max_new_tokens", "must be 1 or more"))
    if sampling.min_new_tokens > max(sampling.max_new_tokens, 1):
        found.append(
            FieldViolation(
                f"{at}sampling.min_new_tokens",
                f"{sampling.min_new_tokens} is more than max_new_tokens {sampling.max_new_tokens}",
            )
        )
    return found


def _named_tokens(sampling: Sampling, vocab_size: int, at: str) -> Iterator[FieldViolation]:
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            f"{at}sampling.stop_token_ids", f"holds more than {MAX_STOP_TOKEN_IDS} token ids"
        )
        return
    for index, token in enumerate(sampling.stop_token_ids):
        if not 0 <= token < vocab_size:
            yield FieldViolation(
                f"{at}sampling.stop_token_ids[{index}]", f"{token} is not in the vocabulary"
            )
    field = f"{at}sampling.logit_bias"
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab_size:
            yield FieldViolation(field, f"token {token} is not in the vocabulary")
        if not abs(bias) <= MAX_LOGIT_BIAS:  # also catches NaN
            yield FieldViolation(field, f"the bias of token {token} must be between -100 and 100")


def check_constraint(constraint: Constraint, at: str) -> Sequence[FieldViolation]:
    """Return what is wrong with a grammar; ``at`` is the path of its options, with its dot."""
    size = len(constraint.source.encode())
    if size == 0:
        problem: str | None = "must not be empty"
    elif size > (most := max_bytes(constraint.kind)):
        problem = f"{size} bytes are more than {most}"
    else:
        problem = shape_problem(constraint)
    return [FieldViolation(f"{at}sampling.constraint", problem)] if problem else ()


def _logprobs(options: LogprobOptions, at: str) -> Iterator[FieldViolation]:
    if not 0 <= options.top <= MAX_TOP_LOGPROBS:
        yield FieldViolation(f"{at}logprobs.top", f"must be between 0 and {MAX_TOP_LOGPROBS}")


def _ticket(
    request: GenerationRequest, info: GeneratorInfo, role: Role
) -> Iterator[FieldViolation]:
    ticket = request.ticket
    if not role.hands_off:
        if ticket is not None and "ticket" not in info.refused_fields:
            yield FieldViolation("ticket", "this worker runs whole requests and takes no ticket")
    elif ticket is None:
        yield FieldViolation("ticket", f"a {role.value} worker needs one")
    elif not 0 <= ticket.room <= MAX_ROOM:
        yield FieldViolation("ticket", "its room is out of range")
    else:
        yield from _engine_data(ticket.engine_data, info.kv_transfer)


def _engine_data(given: EngineData | None, own: KvTransfer | None) -> Iterator[FieldViolation]:
    """Check the part of a ticket that the engine reads, before its signature is."""
    field = "ticket.engine_data"
    if given is None:
        if own is not None and own.needs_data:
            yield FieldViolation(field, f"is needed for {own.kind}; update the Processor")
    elif own is None or given.kind != own.kind:
        sentence = f"must be {own.kind}, this worker's" if own else "this worker takes none"
        yield FieldViolation(f"{field}.kind", sentence)
    elif (nbytes := len(given.data)) > MAX_ENGINE_DATA_BYTES:
        sentence = f"has {nbytes} bytes; at most {MAX_ENGINE_DATA_BYTES} are allowed"
        yield FieldViolation(f"{field}.data", sentence)


def _placement(
    request: GenerationRequest, info: GeneratorInfo, role: Role, at: str
) -> Iterator[FieldViolation]:
    """Check what decides where in the engine a request runs, and what it shares."""
    rank, ticket = request.dp_rank, request.ticket
    last = info.dp_start + info.dp_size - 1
    if rank is not None and not info.dp_start <= rank <= last:
        yield FieldViolation(f"{at}dp_rank", f"must be from {info.dp_start} to {last}, not {rank}")
    elif role is Role.PREFILL and ticket is not None and rank != ticket.prefill_dp_rank:
        yield FieldViolation(
            f"{at}dp_rank", "must be the ticket's prefill_dp_rank, or unset as that one"
        )
    if (nbytes := len(request.cache_salt.encode())) > MAX_SALT_BYTES:
        yield FieldViolation(
            f"{at}cache_salt", f"has {nbytes} bytes; at most {MAX_SALT_BYTES} are allowed"
        )
    elif "\0" in request.cache_salt:
        yield FieldViolation(f"{at}cache_salt", "must not have a zero byte")


def check_adapter(name: str, info: GeneratorInfo, at: str = "") -> None:
    """Check that a LoRA adapter is loaded; ``at`` is the path of the options in the message.

    Raises:
        UnsupportedFeatureError: the engine takes none.
        AdapterNotFoundError: it isn't loaded.
    """
    if not info.takes_adapters:
        raise UnsupportedFeatureError.of(
            f"{at}adapter",
            "this model's workers take no LoRA adapters; leave it out, or start workers that do "
            "(docs/engine-control.md)",
        )
    names = sorted(info.adapter_names())
    if name not in names:
        shown = ", ".join(map(repr, names[:MAX_NAMED])) or "none"
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        message = f"{at}adapter: {name[:128]!r} isn't loaded; loaded now: {shown}{more}"
        raise AdapterNotFoundError(message)


def _missing_abilities(
    request: GenerationRequest,
    knobs: Sequence[tuple[Knob, Any]],
    info: GeneratorInfo,
    at: str,
) -> list[FieldViolation]:
    sampling, logprobs = request.sampling, request.logprobs
    wanted = {
        f"sampling.{knob.name}": knob.ability
        for knob, _ in knobs
        if knob.ability is not None and knob.ability not in info.abilities
    }
    if sampling.constraint is not None:
        is_tag = sampling.constraint.kind is ConstraintKind.STRUCTURAL_TAG
        wanted["sampling.constraint"] = Ability.CONSTRAINTS
        if is_tag and Ability.CONSTRAINTS in info.abilities:
            wanted["sampling.constraint"] = Ability.STRUCTURAL_TAGS
    if sampling.logit_bias:
        wanted["sampling.logit_bias"] = Ability.LOGIT_BIAS
    if request.resumed_tokens:
        wanted["resumed_tokens"] = Ability.RESUMED_OUTPUT
    if logprobs is not None and logprobs.prompt:
        wanted["logprobs.prompt"] = Ability.PROMPT_LOGPROBS
    if not wanted:
        return []
    return [
        FieldViolation(at + field, _advice(ability))
        for field, ability in wanted.items()
        if ability not in info.abilities
        # Those are refused whatever the worker's settings.
        and not info.refused_fields.intersection((field, field.partition(".")[0]))
    ]


def _advice(ability: Ability) -> str:
    setting = _ABILITY_SETTINGS.get(ability)
    if ability is Ability.STRUCTURAL_TAGS:
        return "this worker's engine takes no structural_tag, only the other grammars"
    if setting is None:
        return "this worker's engine cannot do it"
    return f"this worker cannot do it; start it with the engine setting {setting}=true"


def _refused(
    request: GenerationRequest,
    knobs: Sequence[tuple[Knob, Any]],
    info: GeneratorInfo,
    at: str,
) -> Iterator[FieldViolation]:
    """Yield the set fields that the engine would ignore silently, or that would end it.

    A knob counts as set when its value isn't neutral: an unset knob and a neutral one ask for the
    same.
    """
    sampling = request.sampling
    fields = [f"sampling.{knob.name}" for knob, value in knobs if value != _GREEDY.get(knob.name)]
    others = {
        "sampling.logit_bias": bool(sampling.logit_bias),
        "sampling.constraint": sampling.constraint is not None,
        "logprobs": request.logprobs is not None,
        "adapter": bool(request.adapter),
        "cache_salt": bool(request.cache_salt),
        "ticket": request.ticket is not None,
    }
    fields += [field for field, is_set in others.items() if is_set]
    for field in sorted(info.refused_fields.intersection(fields)):
        advice = "this model's engine can't use it; leave it out"
        if field == "sampling.temperature":
            advice = "this model decodes greedily; leave it out, or set it to 0"
        yield FieldViolation(field if field == "ticket" else at + field, advice)
