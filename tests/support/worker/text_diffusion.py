"""GenerateText of a simulated diffusion language model, at a worker and at a Processor."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.simulated.engine import SimulatedConfig
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import (
    ALPHABET,
    MODEL,
    InProcessWorker,
    processor,
    worker,
)
from millstream_testing.waiting import until

DLLM = replace(ALPHABET, role=Role.DIFFUSION)
STEPPING = replace(DLLM, step_s=0.005)


@dataclass
class Place:
    """A server of GenerateText, and the worker behind it."""

    stub: Any
    worker: InProcessWorker


@contextlib.asynccontextmanager
async def serving(
    place: str, text_model: TextModel, config: SimulatedConfig = DLLM
) -> AsyncIterator[Place]:
    """Serve a simulated diffusion language model."""
    async with worker(config) as one:
        if place == "worker":
            yield Place(one.diffusion, one)
            return
        async with processor({MODEL: text_model}, [one.address]) as front:
            yield Place(front.diffusion, one)
            await until(lambda: not front.core.work.count)  # ended requests are no open work
