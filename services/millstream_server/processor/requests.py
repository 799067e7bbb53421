"""The one request of a prompt and its options: made, and checked, without side effects."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.media_checks import tokens_left, too_many_positions
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Ability, Sampling, new_seed
from millstream_server.generation.validation import FieldPaths, check_request
from millstream_server.processor.admission import QueueLimits
from millstream_server.processor.conversation import Caller, Options
from millstream_server.processor.models import ServedModel
from millstream_server.processor.text.messages import ConversationPaths
from millstream_server.processor.text.stops import check_stops
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import FieldViolation, InvalidRequestError
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.request_id import short_text_violations

MAX_CHOICES = 16
MAX_MIN_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits on single requests, and on each model's queue."""

    max_request_tokens: int = 4 << 20
    """n x (prompt + max_new_tokens) of one request."""
    max_request_logprobs: int = 1 << 20
    """Logprobs of one request: about 120 bytes each, so 128 MiB for a client that doesn't read.

    Enough for 49,000 tokens with 20 alternatives each.
    """
    queue: QueueLimits = field(default_factory=QueueLimits)
    """Limits of each model's queue."""


DEFAULT_LIMITS = RequestLimits()


# ---- the paths of a request's parts in its client's messages -------------------------------------


@functools.cache  # of a few fields of ours
def turn_paths(messages: str, options: str) -> FieldPaths:
    """Return a turn's paths, by the turn's own and its options'."""
    return FieldPaths(
        prompt=messages, options=options, request_id="start.request_id", prompt_is_ids=False
    )


@functools.cache  # likewise
def conversation_paths(messages: str, continues: str = "") -> ConversationPaths:
    """Return the paths of a conversation whose last turn came in the field ``messages``."""
    return ConversationPaths(messages, "start.tools", continues)


@functools.cache  # likewise
def completion_paths(options: str, *, is_text: bool) -> FieldPaths:
    """Return a completion's paths, by its options'."""
    return FieldPaths(
        prompt="text" if is_text else "token_ids.ids", options=options, prompt_is_ids=not is_text
    )


# ---- from a prompt to a request ------------------------------------------------------------------


def request_of(
    request_id: str,
    served: ServedModel,
    prompt: Prompt,
    options: Options,
    caller: Caller,
    *,
    fit: bool = False,
) -> GenerationRequest:
    """Make the request of a prompt; with ``fit`` the answer is bounded by what the context leaves.

    `check` comes next.
    """
    engine = served.engine
    return GenerationRequest(
        request_id=request_id,
        model=served.name,
        prompt=prompt,
        sampling=sampling_of(
            options.sampling,
            served.defaults,
            tokens_left(prompt, engine.context_length, served.text.family),
            fit=fit,
            seeded=Ability.SEED in engine.abilities,
        ),
        logprobs=options.logprobs,
        priority=Priority.NORMAL if options.priority is None else options.priority,
        deadline_s=caller.deadline_s,
        trace=caller.trace,
        adapter=options.adapter,
        cache_salt=options.cache_salt,
    )


def sampling_of(
    asked: Mapping[str, Any],
    defaults: Mapping[str, Any],
    most: int,
    *,
    fit: bool = False,
    seeded: bool = False,
) -> Sampling:
    """Fill in what the client left unset: the model's own ``defaults``, then neutral values.

    An unset max_new_tokens becomes ``most``, what the context leaves; with ``fit`` it is never more
    than that. ``seeded``: all workers take seeds, so one is drawn here: a leg then starts without
    a copy of its request (`dispatch.first_seed` draws for mixed workers).
    """
    values = {**defaults, **asked}
    most = max(1, most)
    new = values.setdefault("max_new_tokens", most)
    if fit and new > most:
        values["max_new_tokens"] = most
    if seeded and values.get("seed") is None and values.get("temperature") != 0:
        values["seed"] = new_seed()
    return Sampling(**values)


def with_kept_seed(options: Options, engine: GeneratorInfo) -> Options:
    """Leave out a seed of best effort that ``engine``, the least of all workers', can't keep."""
    if "seed_best_effort" not in options.sampling:
        return options
    sampling = {name: v for name, v in options.sampling.items() if name != "seed_best_effort"}
    keeps = Ability.SEED in engine.abilities and "sampling.seed" not in engine.refused_fields
    left_out = not keeps and sampling.pop("seed", None) is not None
    return replace(options, sampling=sampling, seed_left_out=left_out)


# ---- checks --------------------------------------------------------------------------------------


def check(
    request: GenerationRequest,
    options: Options,
    served: ServedModel,
    limits: RequestLimits,
    paths: FieldPaths,
    *,
    media_fields: Sequence[str] = (),
) -> None:
    """Refuse what can't succeed, naming every wrong field; ``media_fields`` are those of the items.

    Raises:
        InvalidRequestError: something is wrong.
    """
    violations = _option_violations(request.request_id, options, paths) or too_large(
        request, options.n, limits, paths.options
    )
    if violations:
        raise InvalidRequestError.of_all(violations)
    check_request(request, served.engine, Role.AGGREGATED, paths)
    family, most = served.text.family, served.engine.context_length
    stray = _stray_placeholders(request.prompt, served.text, paths)
    if violations := stray or [*too_many_positions(request, most, family, media_fields)]:
        raise InvalidRequestError.of_all(violations)


def check_options(request_id: str, options: Options, paths: FieldPaths) -> None:
    """Refuse wrong options before there is a prompt.

    Raises:
        InvalidRequestError: one is wrong.
    """
    violations = _option_violations(request_id, options, paths)
    if violations:
        raise InvalidRequestError.of_all(violations)


def _option_violations(
    request_id: str, options: Options, paths: FieldPaths
) -> list[FieldViolation]:
    at = paths.options
    found: list[FieldViolation] = []
    if options.stops:
        found += [replace(v, field=at + v.field) for v in check_stops(options.stops)]
    if not 1 <= options.n <= MAX_CHOICES:
        found.append(FieldViolation(f"{at}n", f"must be from 1 to {MAX_CHOICES}, not {options.n}"))
    if not 0 <= options.min_interval_s <= MAX_MIN_INTERVAL_S:
        found.append(FieldViolation(f"{at}min_interval", "must be from 0 s to 10 s"))
    found += short_text_violations(request_id, paths.request_id)
    if options.session:
        found += short_text_violations(options.session, f"{at}session")
    if options.priority is None:
        found.append(FieldViolation(f"{at}priority", "is not one that this server has"))
    return found


def _stray_placeholders(prompt: Prompt, text: TextModel, paths: FieldPaths) -> list[FieldViolation]:
    """Refuse a text that has the model's placeholders; with media `Prompts.with_media` does."""
    if prompt.media or text.family is None:
        return []
    if text.soft_tokens.isdisjoint(prompt.token_ids):
        return []
    found = sum(map(prompt.token_ids.count, text.soft_tokens))
    return [
        FieldViolation(
            paths.prompt,
            f"has {found} of the model's own placeholders for images and videos, and 0 images and "
            "videos; leave them out, Chat places them itself",
        )
    ]


def most_tokens(request: GenerationRequest, n: int) -> int:
    """Count the tokens that a request may use: prompt and completion of every choice."""
    return n * (len(request.prompt) + request.sampling.max_new_tokens)


def too_large(
    request: GenerationRequest, n: int, limits: RequestLimits, at: str
) -> list[FieldViolation]:
    """Return violations of the limits, before anything is allocated.

    ``at`` is the path of the options, with its dot.
    """
    tokens, new = len(request.prompt), request.sampling.max_new_tokens
    found = []
    if most_tokens(request, n) > limits.max_request_tokens:
        found.append(
            FieldViolation(
                f"{at}n" if n > 1 else f"{at}sampling.max_new_tokens",
                f"{n} x ({tokens} prompt tokens + max_new_tokens {new}) is more than "
                f"{limits.max_request_tokens}, the most of one request",
            )
        )
    logprobs = request.logprobs
    if logprobs:
        positions = new + (tokens if logprobs.prompt else 0)
        each = max(logprobs.top, 0) + 1
        if n * positions * each > limits.max_request_logprobs:
            found.append(
                FieldViolation(
                    f"{at}logprobs.top" if each > 1 else f"{at}logprobs",
                    f"{n} x {positions} tokens x {each} logprobs is more than "
                    f"{limits.max_request_logprobs}, the most of one request; lower top, n or "
                    "max_new_tokens",
                )
            )
    return found
