"""Is a request one that this engine can serve? Checked before an engine sees it.

Some of these checks protect more than the answer: a token id outside the vocabulary ends SGLang's
process, and with it every other request.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from millstream_server.engines.base import (
    Ability,
    Constraint,
    ConstraintKind,
    EngineInfo,
    GenerationRequest,
    LogprobOptions,
    Role,
    Sampling,
)
from millstream_server.runtime.errors import (
    FieldViolation,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.json_bounds import read_schema

MAX_CONSTRAINT_BYTES = 64 * 1024
MAX_CONSTRAINT_DEPTH = 128
"""Parentheses around each other in a regex or an EBNF grammar."""
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 2.0
MAX_ROOM = 2**63 - 1
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_VIOLATIONS = 16
"""Reported at once: they travel in trailers, which are limited to some 8 KiB."""

_ABILITY_SETTINGS: Mapping[Ability, str] = {
    Ability.SEED: "deterministic",
    Ability.MIN_NEW_TOKENS: "engine_tokenizer",
    Ability.CONSTRAINTS: "engine_tokenizer",
}

# What parentheses mean nothing in (escapes, character classes, EBNF's strings and comments), and
# those that count. Possessive, so that no input takes more than one pass.
_CLASS = r"\[(?:[^\]\\]|\\.)*+\]?"
_PARENTHESES = {
    ConstraintKind.REGEX: re.compile(rf"\\.|{_CLASS}|[()]", re.DOTALL),
    ConstraintKind.EBNF: re.compile(rf'"(?:[^"\\\n]|\\.)*+"?|#[^\n]*+|{_CLASS}|[()]', re.DOTALL),
}


def check_request(request: GenerationRequest, info: EngineInfo, role: Role) -> None:
    """Refuse what cannot be served, naming every field that is wrong at once.

    Raises:
        InvalidRequestError: a value is out of range, whatever the worker's settings.
        UnsupportedFeatureError: values are fine, but this worker lacks an ability.
    """
    found = itertools.chain(
        _prompt(request.token_ids, request.sampling.max_new_tokens, info),
        _distribution(request.sampling),
        _penalties(request.sampling),
        _lengths(request.sampling),
        _tokens_named(request.sampling, info.vocab_size),
        _constraint(request.sampling),
        _logprobs(request.logprobs),
        _ticket(request, role),
    )
    violations = tuple(itertools.islice(found, MAX_VIOLATIONS))
    if violations:
        raise InvalidRequestError(_sentence(violations), violations=violations)
    missing = tuple(_missing_abilities(request, info))
    if missing:
        raise UnsupportedFeatureError(_sentence(missing), violations=missing)


def _sentence(violations: Sequence[FieldViolation]) -> str:
    return "; ".join(f"{found.field}: {found.description}" for found in violations)


def _prompt(
    token_ids: Sequence[int], max_new_tokens: int, info: EngineInfo
) -> Iterator[FieldViolation]:
    if not token_ids:
        yield FieldViolation("token_ids", "must not be empty")
        return
    # Two passes in C find that all is well; only a bad prompt is searched.
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        index, token = next(
            (index, token)
            for index, token in enumerate(token_ids)
            if not 0 <= token < info.vocab_size
        )
        yield FieldViolation(
            f"token_ids[{index}]", f"{token} is not in the vocabulary (0 to {info.vocab_size - 1})"
        )
    if len(token_ids) + max(max_new_tokens, 1) > info.context_length:
        # Name the one that must shrink.
        yield FieldViolation(
            "token_ids" if len(token_ids) >= info.context_length else "sampling.max_new_tokens",
            f"{len(token_ids)} prompt tokens and max_new_tokens {max_new_tokens} exceed "
            f"the context length of {info.context_length} tokens",
        )


def _distribution(sampling: Sampling) -> Iterator[FieldViolation]:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        yield FieldViolation("sampling.temperature", "must be a finite number, 0 or more")
    if not 0 < sampling.top_p <= 1:
        yield FieldViolation("sampling.top_p", "must be above 0 and at most 1")
    if sampling.top_k < 0:
        yield FieldViolation("sampling.top_k", "must be 0 (off) or more")
    if not 0 <= sampling.min_p <= 1:
        yield FieldViolation("sampling.min_p", "must be between 0 and 1")
    if sampling.seed is not None and not MIN_SEED <= sampling.seed <= MAX_SEED:
        yield FieldViolation("sampling.seed", "must fit a signed 64-bit integer")


def _penalties(sampling: Sampling) -> Iterator[FieldViolation]:
    for name, value in (
        ("frequency_penalty", sampling.frequency_penalty),
        ("presence_penalty", sampling.presence_penalty),
    ):
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            yield FieldViolation(f"sampling.{name}", "must be between -2 and 2")
    if not 0 < sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        yield FieldViolation("sampling.repetition_penalty", "must be above 0 and at most 2")


def _lengths(sampling: Sampling) -> Iterator[FieldViolation]:
    if sampling.max_new_tokens < 1:
        yield FieldViolation("sampling.max_new_tokens", "must be 1 or more")
    if sampling.min_new_tokens < 0:
        yield FieldViolation("sampling.min_new_tokens", "must be 0 or more")
    elif sampling.min_new_tokens > max(sampling.max_new_tokens, 1):
        yield FieldViolation(
            "sampling.min_new_tokens",
            f"{sampling.min_new_tokens} is more than max_new_tokens {sampling.max_new_tokens}",
        )


def _tokens_named(sampling: Sampling, vocab_size: int) -> Iterator[FieldViolation]:
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            "sampling.stop_token_ids", f"holds more than {MAX_STOP_TOKEN_IDS} token ids"
        )
        return
    for index, token in enumerate(sampling.stop_token_ids):
        if not 0 <= token < vocab_size:
            yield FieldViolation(
                f"sampling.stop_token_ids[{index}]", f"{token} is not in the vocabulary"
            )
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab_size:
            yield FieldViolation("sampling.logit_bias", f"token {token} is not in the vocabulary")
        if not abs(bias) <= MAX_LOGIT_BIAS:  # also catches NaN
            yield FieldViolation(
                "sampling.logit_bias", f"the bias of token {token} must be between -100 and 100"
            )


def _constraint(sampling: Sampling) -> Iterator[FieldViolation]:
    if sampling.constraint is None:
        return
    size = len(sampling.constraint.source.encode())
    if size == 0:
        yield FieldViolation("sampling.constraint", "must not be empty")
    elif size > MAX_CONSTRAINT_BYTES:
        yield FieldViolation(
            "sampling.constraint", f"{size} bytes are more than {MAX_CONSTRAINT_BYTES}"
        )
    elif problem := _shape_problem(sampling.constraint):
        yield FieldViolation("sampling.constraint", problem)


# Every choice and leg of a request is checked, and clients send the same few grammars all day.
@lru_cache(maxsize=64)
def _shape_problem(constraint: Constraint) -> str | None:
    """Say what keeps a grammar from being compiled safely; whether it is right, the engine says."""
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        problem, _ = read_schema(constraint.source)
        return f"json_schema {problem}" if problem else None
    depth = 0
    for found in _PARENTHESES[constraint.kind].finditer(constraint.source):
        depth = max(depth + {"(": 1, ")": -1}.get(found[0], 0), 0)
        if depth > MAX_CONSTRAINT_DEPTH:
            return f"{constraint.kind.value} must not nest deeper than {MAX_CONSTRAINT_DEPTH}"
    return None


def _logprobs(options: LogprobOptions | None) -> Iterator[FieldViolation]:
    if options is not None and not 0 <= options.top <= MAX_TOP_LOGPROBS:
        yield FieldViolation("logprobs.top", f"must be between 0 and {MAX_TOP_LOGPROBS}")


def _ticket(request: GenerationRequest, role: Role) -> Iterator[FieldViolation]:
    handoff = request.handoff
    if role is Role.AGGREGATED:
        if handoff is not None:
            yield FieldViolation("ticket", "this worker runs whole requests and takes no ticket")
    elif handoff is None:
        yield FieldViolation("ticket", f"a {role.value} worker needs one")
    elif not 0 <= handoff.room <= MAX_ROOM:
        yield FieldViolation("ticket", "its room is out of range")


def _missing_abilities(request: GenerationRequest, info: EngineInfo) -> Iterator[FieldViolation]:
    sampling = request.sampling
    asked = (
        ("sampling.seed", Ability.SEED, sampling.seed is not None),
        ("sampling.min_new_tokens", Ability.MIN_NEW_TOKENS, sampling.min_new_tokens > 0),
        ("sampling.constraint", Ability.CONSTRAINTS, sampling.constraint is not None),
        ("sampling.logit_bias", Ability.LOGIT_BIAS, bool(sampling.logit_bias)),
        (
            "logprobs.prompt",
            Ability.PROMPT_LOGPROBS,
            request.logprobs is not None and request.logprobs.prompt,
        ),
    )
    for field, ability, wanted in asked:
        if wanted and ability not in info.abilities:
            yield FieldViolation(field, _advice(ability))


def _advice(ability: Ability) -> str:
    setting = _ABILITY_SETTINGS.get(ability)
    if setting is None:
        return "this worker's engine cannot do it"
    return f"this worker cannot do it; start it with the engine setting {setting}=true"
