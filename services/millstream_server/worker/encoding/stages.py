"""How long an item spent in each stage: for metrics and its span."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from contextlib import contextmanager

from millstream_server.runtime.telemetry.metrics import ENCODE_STAGE_DURATION


class Stage(enum.Enum):
    """A part of an item's way; the values are metrics' labels."""

    UPLOAD = "upload"
    QUEUE = "queue"
    """Waits for its turn to be decoded."""
    DECODE = "decode"
    PREPARE = "prepare"
    BATCH_QUEUE = "batch_queue"
    """Prepared; waits for the tower."""
    FORWARD = "forward"
    """In the tower, with the rest of its batch."""


_DURATIONS = {stage: ENCODE_STAGE_DURATION.labels(stage.value) for stage in Stage}


class Stages:
    """Durations of one item's stages, in seconds."""

    __slots__ = ("_took",)

    def __init__(self) -> None:
        """Start without any."""
        self._took: dict[Stage, float] = {}

    def add(self, stage: Stage, took_s: float) -> None:
        """Record a stage that has ended."""
        self._took[stage] = self._took.get(stage, 0.0) + took_s
        _DURATIONS[stage].observe(took_s)

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Record the ``with`` block as a stage, unless it raises."""
        began = time.monotonic()
        yield
        self.add(stage, time.monotonic() - began)

    def attributes(self) -> dict[str, float]:
        """Return a span's attributes."""
        return {f"millstream.encode.{stage.value}_s": s for stage, s in self._took.items()}
