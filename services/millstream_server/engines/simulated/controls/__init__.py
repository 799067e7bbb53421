"""What operators can do with a simulated engine: one class per ability."""

from __future__ import annotations

from collections.abc import Sequence

from millstream_server.control.operations import EngineControls
from millstream_server.engines.base import Role
from millstream_server.engines.simulated.config import SimulatedConfig
from millstream_server.engines.simulated.controls.adapters import SimulatedAdapters
from millstream_server.engines.simulated.controls.memory import SimulatedMemory
from millstream_server.engines.simulated.controls.pause import SimulatedCache, SimulatedPause
from millstream_server.engines.simulated.controls.profile import SimulatedProfile
from millstream_server.engines.simulated.controls.weights import SimulatedWeights
from millstream_server.engines.simulated.rank import Rank
from millstream_server.engines.simulated.state import EngineState


def make_controls(
    config: SimulatedConfig, state: EngineState, ranks: Sequence[Rank]
) -> EngineControls:
    """Make an engine's operations; a diffusion language model takes no adapters."""
    diffusion = config.role is Role.DIFFUSION
    return EngineControls(
        memory=SimulatedMemory(state, ranks),
        pause=SimulatedPause(config.role, ranks),
        cache=SimulatedCache(ranks),
        weights=SimulatedWeights(config, state, ranks),
        profile=SimulatedProfile(ranks),
        adapters=None if diffusion else SimulatedAdapters(state, ranks),
    )
