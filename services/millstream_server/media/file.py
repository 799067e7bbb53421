"""An image's or a video's file, on its way to an encode worker."""

from __future__ import annotations

import time
from dataclasses import dataclass

from millstream_server.media.items import Modality
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFile:
    """A file, and how it is to be encoded."""

    modality: Modality
    data: bytes | memoryview
    """The file."""
    sha256: bytes
    """SHA-256 of ``data``."""
    salt: str = ""
    """Callers with different salts share no cached results."""
    request_id: str = ""
    """The client's id for logs and traces: any text, not unique."""
    trace: TraceContext = NOT_TRACED
    deadline_s: float | None = None
    """The caller's deadline on the clock of `time.monotonic`; None: no deadline."""

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the deadline, negative after it; None: no deadline."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()
