"""A vLLM engine from its start to its end, whatever it does with requests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from millstream_server.control.engine import LoadProgress
from millstream_server.engines.lifetime import EngineLifetime, InfoT
from millstream_server.engines.model_loading import WeightsProgress
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.launch import BuiltEngine, EngineStart
from millstream_server.runtime.errors import ServingError


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
        self._cores: set[int] = set()
        """File descriptors of the core processes that run."""

    async def start(self, config: VllmEngineConfig) -> BuiltEngine:
        """Load the model in a thread.

        Raises:
            EngineFailedError: it couldn't be loaded.
        """
        built = await self._start.build(config)
        self._weights.all_read()
        return built

    def started(
        self, built: BuiltEngine, info: InfoT, on_failure: Callable[[ServingError], None]
    ) -> None:
        """Report a later death to ``on_failure``, once, as soon as a core process has ended.

        vLLM itself waits for the end of that core's workers, too, which finish their step first:
        they have inherited the pipe whose end tells it.
        """
        super().started(built, info, on_failure)
        if sys.platform != "linux":
            return
        loop = asyncio.get_running_loop()
        for pid in built.core_pids():
            try:
                core = os.pidfd_open(pid)
            except OSError:  # a sandbox without it, or it has just ended: vLLM notices
                continue
            self._cores.add(core)
            loop.add_reader(core, self._core_ended, core)

    def _core_ended(self, core: int) -> None:
        self._forget(core)
        self.lose("a core process ended")

    def _forget(self, core: int) -> None:
        self._cores.remove(core)
        asyncio.get_running_loop().remove_reader(core)
        os.close(core)

    def load_progress(self) -> LoadProgress:
        """See `control.engine.LoadObserved`."""
        return self._weights.look()

    async def close(self) -> None:
        """Stop vLLM's processes, also while they start."""
        if self._end():
            for core in list(self._cores):
                self._forget(core)
            await self._start.end()
