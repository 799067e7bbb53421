"""Which operations an engine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from millstream_server.control.adapters import AdapterControl
from millstream_server.control.memory import MemoryControl
from millstream_server.control.pause import CacheControl, PauseControl
from millstream_server.control.profile import ProfileControl
from millstream_server.control.weights import WeightControl


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineControls:
    """An engine's operations; None: it doesn't have them. `Drain` needs none of them."""

    memory: MemoryControl | None = None
    pause: PauseControl | None = None
    cache: CacheControl | None = None
    weights: WeightControl | None = None
    profile: ProfileControl | None = None
    adapters: AdapterControl | None = None


NO_CONTROLS = EngineControls()


@runtime_checkable
class Controlled(Protocol):
    """An engine that operators can control while it runs."""

    @property
    def controls(self) -> EngineControls:
        """Its operations; valid from start to close."""
        ...
