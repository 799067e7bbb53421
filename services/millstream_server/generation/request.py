"""One text request; the same type from the Processor's conversion down to the engine."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import field

from millstream_server.generation.sampling import Sampling
from millstream_server.generation.ticket import Ticket
from millstream_server.media.items import MediaInput
from millstream_server.runtime.frozen import dataclass
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext


@dataclass(frozen=True, slots=True)
class Prompt:
    """A model's input: token ids, and the media whose placeholders are among them."""

    token_ids: Sequence[int]
    media: tuple[MediaInput, ...] = ()
    """In the order of their first placeholder."""

    def __len__(self) -> int:
        """Return the number of positions in the model's context."""
        return len(self.token_ids)

    @property
    def media_start(self) -> int | None:
        """Position of the first placeholder; None: there is none."""
        if not self.media:
            return None
        return min((span.start for item in self.media for span in item.spans), default=None)

    @property
    def media_tokens(self) -> int:
        return sum(item.tokens for item in self.media) if self.media else 0


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Which logprobs to return: the chosen tokens', the `top` likeliest, the prompt's."""

    top: int = 0
    prompt: bool = False


def new_engine_id() -> str:
    """Make a request id for an engine: 128 random bits in 32 hex digits; no client sees it."""
    return f"{random.getrandbits(128):032x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt, and how to continue it.

    The Processor makes one per turn and derives each leg's request from it with
    `runtime.frozen.changed`: another choice's seed, the ticket of a hand-off, the leg's span.
    """

    request_id: str = ""
    """The client's id for logs and traces: any text, not unique."""
    engine_id: str = field(default_factory=new_engine_id)
    """The engine's id: 32 random hex digits, never a client's (SGLang aborts by id *prefix*)."""
    model: str = ""
    prompt: Prompt
    sampling: Sampling
    logprobs: LogprobOptions | None = None
    adapter: str = ""
    """Name of the LoRA adapter to use; empty: the base model."""
    dp_rank: int | None = None
    """The data-parallel rank that runs it; None: the engine chooses."""
    cache_salt: str = ""
    """Requests with different salts share no KV cache; empty: no salt."""
    resumed_tokens: int = 0
    """The last so many prompt tokens are output of this request on another worker, for penalties
    and the grammar; the sampling's budgets are what is left."""
    expected_cached_tokens: int = 0
    """Prompt tokens that routing expects in the worker's KV cache; stays in the Processor."""
    priority: Priority = Priority.NORMAL
    deadline_s: float | None = None
    """The caller's deadline on the clock of `time.monotonic`; None: no deadline."""
    trace: TraceContext = NOT_TRACED
    ticket: Ticket | None = None
    """For a hand-off between a prefill and a decode worker; else None."""

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the deadline, negative after it; None: no deadline."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    @property
    def token_ids(self) -> Sequence[int]:
        return self.prompt.token_ids
