"""How much of one request, and of all, is let in."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream_server.processor.generation import GenerationSpec
from millstream_server.runtime.admission import QueueLimits
from millstream_server.runtime.errors import FieldViolation


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """How much is let in."""

    max_request_tokens: int = 4 << 20
    """n x (prompt + max_new_tokens) of one request."""
    max_request_logprobs: int = 1 << 20
    """Logprobs of one request. At some 120 bytes each, a client that doesn't read holds 128 MiB.

    An answer of 49,000 tokens with 20 alternatives each is still within it.
    """
    queue: QueueLimits = field(default_factory=QueueLimits)
    """Each model's."""


DEFAULT_LIMITS = RequestLimits()


def most_tokens(spec: GenerationSpec) -> int:
    """Count the tokens a request may take: prompts and answers of every choice."""
    return spec.n * (len(spec.token_ids) + spec.sampling.max_new_tokens)


def too_large(spec: GenerationSpec, limits: RequestLimits) -> list[FieldViolation]:
    """Find the products that are over the limits, before anything is made of each factor."""
    tokens, new = len(spec.token_ids), spec.sampling.max_new_tokens
    found = []
    if most_tokens(spec) > limits.max_request_tokens:
        found.append(
            FieldViolation(
                "options.n" if spec.n > 1 else "options.sampling.max_new_tokens",
                f"{spec.n} x ({tokens} prompt tokens + max_new_tokens {new}) is more than "
                f"{limits.max_request_tokens}, the most of one request",
            )
        )
    if spec.logprobs:
        positions = new + (tokens if spec.logprobs.prompt else 0)
        each = max(spec.logprobs.top, 0) + 1
        if spec.n * positions * each > limits.max_request_logprobs:
            found.append(
                FieldViolation(
                    "options.logprobs.top" if each > 1 else "options.logprobs",
                    f"{spec.n} x {positions} tokens x {each} logprobs is more than "
                    f"{limits.max_request_logprobs}, the most of one request; lower top, n or "
                    "max_new_tokens",
                )
            )
    return found
