"""How long a request spent in each stage: for metrics and its span."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from contextlib import contextmanager

from millstream_server.runtime.telemetry.metrics import DIFFUSION_STAGE_DURATION


class Stage(enum.Enum):
    """A part of a request's way; the values are metrics' labels."""

    QUEUE = "queue"
    """From its arrival until it gets the device; its input is prepared meanwhile."""
    RUN = "run"
    """All of its outputs."""
    WRITE = "write"
    """One output's file is written."""
    DELIVER = "deliver"
    """The file is sent or stored."""


_DURATIONS = {stage: DIFFUSION_STAGE_DURATION.labels(stage.value) for stage in Stage}


class Stages:
    """Durations of one request's stages, in seconds; of several files together."""

    def __init__(self) -> None:
        """Start without any."""
        self._took = dict.fromkeys(Stage, 0.0)

    def __getitem__(self, stage: Stage) -> float:
        """Return how long a stage took."""
        return self._took[stage]

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Record the ``with`` block as a stage, unless it raises."""
        began = time.monotonic()
        yield
        took_s = time.monotonic() - began
        self._took[stage] += took_s
        _DURATIONS[stage].observe(took_s)

    def attributes(self) -> dict[str, float]:
        """Return a span's attributes."""
        return {f"millstream.diffusion.{stage.value}_s": s for stage, s in self._took.items()}
