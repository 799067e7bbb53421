"""How much a worker holds at once.

Its Processors' queues normally keep it far below. The bounds are there for several Processors, each
of which counts on the whole of the worker, and for callers that have no queue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from millstream_server.engines.base import EngineInfo
from millstream_server.runtime import metrics
from millstream_server.runtime.admission import jittered
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import OverloadedError

_TIMES = 4
"""Bounds that are not set are so many times what the engine works on: it never runs dry."""
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Bounds of one worker."""

    max_open_requests: int = 0
    """Running and queued in the engine; 0: four times what it runs at once."""
    max_open_tokens: int = 0
    """Prompt tokens of open requests; 0: four times what the KV cache holds."""


DEFAULT_LIMITS = WorkerLimits()


class Room:
    """Counts what is open, in the worker's `OpenWork` too."""

    def __init__(self, limits: WorkerLimits, work: OpenWork) -> None:
        """Start empty."""
        self.tokens = 0
        """Prompt tokens of open requests."""
        self._limits = limits
        self._work = work

    def check(self, prompt_tokens: int, info: EngineInfo) -> None:
        """See that one more request would fit.

        Raises:
            OverloadedError: it doesn't.
        """
        requests = self._limits.max_open_requests or _TIMES * info.max_running_requests
        if self._work.count >= requests:
            raise _overloaded("requests", f"{requests} requests are open on it already")
        tokens = self._limits.max_open_tokens or _TIMES * info.total_blocks * info.block_size
        # A prompt that is longer than that by itself may run when nothing else does.
        if self.tokens and self.tokens + prompt_tokens > tokens:
            raise _overloaded(
                "tokens",
                f"{prompt_tokens} prompt tokens more would be over the {tokens} that may be open",
            )

    def enter(self, prompt_tokens: int) -> Callable[[], None]:
        """Count a request in; answers what counts it out, to be called once."""
        self._work.begin()
        self.tokens += prompt_tokens
        return functools.partial(self._leave, prompt_tokens)

    def _leave(self, prompt_tokens: int) -> None:
        self.tokens -= prompt_tokens
        self._work.end()


def _overloaded(cause: str, why: str) -> OverloadedError:
    metrics.ADMISSION_REFUSED.labels(cause).inc()
    return OverloadedError(
        f"the worker is busy: {why}; retry later", retry_delay_s=jittered(_RETRY_S)
    )
