"""Limits on single requests, and on each model's queue."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream_server.generation.request import GenerationRequest
from millstream_server.processor.queue.admission_queue import QueueLimits
from millstream_server.runtime.errors import FieldViolation


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
