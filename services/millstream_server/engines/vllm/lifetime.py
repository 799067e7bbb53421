"""A vLLM engine from its start to its end, whatever it does with requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream_server.control.engine import LoadProgress
from millstream_server.engines.lifetime import EngineLifetime, InfoT
from millstream_server.engines.model_loading import WeightsProgress
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.launch import BuiltEngine, EngineStart


class VllmLifetime(EngineLifetime[BuiltEngine, InfoT]):
    """Starts vLLM, knows whether it lives, and stops it.

    Order of calls: `start`, `started`, the others, `close`. `close` may be called twice and after a
    failed start.
    """

    def __init__(self, config: VllmEngineConfig, fail_all: Callable[[str], None]) -> None:
        """``fail_all`` is called once at the end, with why: it ends what is open."""
        super().__init__("vLLM", fail_all)
        self._start = EngineStart()
        self._weights = WeightsProgress(Path(config.model_path))

    async def start(self, config: VllmEngineConfig) -> BuiltEngine:
        """Load the model in a thread.

        Raises:
            EngineFailedError: it couldn't be loaded.
        """
        built = await self._start.build(config)
        self._weights.all_read()
        return built

    def load_progress(self) -> LoadProgress:
        """See `control.engine.LoadObserved`."""
        return self._weights.look()

    async def close(self) -> None:
        """Stop vLLM's processes, also while they start."""
        if self._end():
            await self._start.end()
