"""Loading and unloading the simulated engine's LoRA adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from millstream_server.control.operations import LoraAdapter
from millstream_server.engines.simulated.controls.weights import check_file, read_json
from millstream_server.engines.simulated.rank import Rank
from millstream_server.engines.simulated.state import EngineState
from millstream_server.runtime.errors import InvalidWeightsError


class SimulatedAdapters:
    """Satisfies `control.operations.AdapterControl`.

    An adapter is a directory with an adapter_config.json that has PEFT's rank ``r``. Its weights in
    adapter_model.safetensors have no effect and may be missing, but not be incomplete.
    """

    def __init__(self, state: EngineState, ranks: Sequence[Rank]) -> None:
        """Work on these ranks."""
        self._state = state
        self._ranks = ranks

    async def load_adapter(self, name: str, path: Path) -> LoraAdapter:
        """See `AdapterControl.load_adapter`."""
        rank = await asyncio.to_thread(_rank, path)
        adapter = LoraAdapter(name, rank, path)
        self._state.adapters[name] = adapter
        return adapter

    async def unload_adapter(self, name: str) -> None:
        """See `AdapterControl.unload_adapter`. Its KV is dropped: the name may come again."""
        self._state.adapters.pop(name, None)
        while any(rank.uses_adapter(name) for rank in self._ranks):
            self._state.request_ended.clear()
            await self._state.request_ended.wait()
        for rank in self._ranks:
            rank.cache.forget_adapter(name)


def _rank(path: Path) -> int:
    rank = read_json(path, "adapter_config.json").get("r")
    if type(rank) is not int or rank < 1:
        raise InvalidWeightsError(
            f"adapter_config.json must have the adapter's rank as a whole number r of 1 or more, "
            f"not {rank!r}"
        )
    weights = path / "adapter_model.safetensors"
    if weights.exists():
        check_file(weights)
    return rank
