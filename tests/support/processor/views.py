"""Workers as routing sees them, without any link."""

from __future__ import annotations

from typing import Any

from millstream_server.control.engine import EngineLoad, Role, WorkerDescription
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.routing.workers import WorkerView


def description(
    role: Role = Role.AGGREGATED, *, model: str = "m", **engine: Any
) -> WorkerDescription:
    """Describe a worker."""
    known = {
        "engine": "simulated",
        "engine_version": "1",
        "max_running_requests": 4,
        "vocab_size": 9,
        "context_length": 9,
        "block_size": 1,
        "total_blocks": 9,
    }
    return WorkerDescription(role=role, model=model, engine=GeneratorInfo(**{**known, **engine}))


def view(address: str, role: Role = Role.AGGREGATED, **engine: Any) -> WorkerView:
    """Make the view of a worker that takes requests."""
    what = description(role, **engine)
    return WorkerView(address, what, what)


def load(running: int, queued: int = 0) -> EngineLoad:
    """Report a load."""
    return EngineLoad(
        running_requests=running, queued_requests=queued, used_blocks=0, total_blocks=1
    )
