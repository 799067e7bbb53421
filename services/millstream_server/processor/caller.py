"""What an RPC brings that a request came with."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of an RPC."""

    deadline_s: float | None = None
    """On the clock of `time.monotonic`; None: none."""
    trace: TraceContext = NOT_TRACED
    name: str = ""
    """Whose key or certificate it has (`runtime.security.auth.caller`)."""
