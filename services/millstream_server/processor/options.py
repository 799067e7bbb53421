"""What a client asked for besides its messages, in plain types, not validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream_server.generation.request import LogprobOptions
from millstream_server.runtime.frozen import dataclass
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of an RPC."""

    deadline_s: float | None = None
    """On the clock of `time.monotonic`; None: none."""
    trace: TraceContext = NOT_TRACED
    name: str = ""
    """Whose key or certificate it has (`runtime.security.auth.caller`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one turn."""

    path: str
    """Path of their message, with a dot at the end: ``start.options.``."""
    sampling: Mapping[str, Any]
    """The fields of `Sampling` that the client set."""
    logprobs: LogprobOptions | None = None
    priority: Priority | None = Priority.NORMAL
    """None: an unknown value, which is refused."""
    n: int = 1
    stops: tuple[str, ...] = ()
    min_interval_s: float = 0.0
    return_token_ids: bool = False
    include_special_tokens: bool = False
    adapter: str = ""
    """Name of a LoRA adapter; empty: the model itself."""
    session: str = ""
    """Requests with the same one go to the same worker; empty: no preference."""
    cache_salt: str = ""
    """Requests with different ones share no KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A raw prompt to be continued: text or token ids."""

    model: str
    request_id: str
    prompt: str | Sequence[int]
    options: Options
