"""How loaded a process is, as in load reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """How loaded the process is now. Shares are relative to its limits; 0 means unknown."""

    application_utilization: float = 0.0
    """Open work divided by the work it can do at once; above 1 while requests queue."""
    cpu_utilization: float = 0.0
    mem_utilization: float = 0.0
    rps: float = 0.0
    """Requests that ended, per second."""
    eps: float = 0.0
    """Those of them that failed by the server's fault, per second."""
    named_metrics: Mapping[str, float] = field(default_factory=dict)


LoadSource = Callable[[], LoadSnapshot]
"""Returns the current load, at once; called up to ten times a second by each reporter."""
