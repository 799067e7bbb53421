"""A vLLM engine from its start to its end, whatever it does with requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from millstream_server.control.engine import EngineInfo, LoadProgress
from millstream_server.engines.sglang.model_loading import WeightsProgress
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.launch import BuiltEngine, EngineStart
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

InfoT = TypeVar("InfoT", bound=EngineInfo)


class VllmLifetime(Generic[InfoT]):
    """Starts vLLM, knows whether it lives, and stops it.

    Order of calls: `start`, `started`, the others, `close`. `close` may be called twice and after a
    failed start.
    """

    def __init__(self, config: VllmEngineConfig, fail_all: Callable[[str], None]) -> None:
        """``fail_all`` is called once at the end, with why: it ends what is open."""
        self.ended = asyncio.Event()
        """Set when vLLM doesn't work any more."""
        self.closed = False
        self._fail_all = fail_all
        self._start = EngineStart()
        self._weights = WeightsProgress(Path(config.model_path))
        self._running: tuple[BuiltEngine, InfoT] | None = None
        self._on_failure: Callable[[ServingError], None] | None = None
        self._failure = ""

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
        """Report a later death to ``on_failure``, once.

        Raises:
            EngineFailedError: it has died already.
        """
        if self._failure:
            raise EngineFailedError(self._failure)
        self._running, self._on_failure = (built, info), on_failure

    def load_progress(self) -> LoadProgress:
        """See `control.engine.LoadObserved`."""
        return self._weights.look()

    def ready(self) -> tuple[BuiltEngine, InfoT]:
        """Return the running engine, and what its worker tells its callers.

        Raises:
            EngineFailedError: it has not started, or runs no more.
        """
        if self._failure:
            raise EngineFailedError(self._failure)
        if self._running is None:
            raise EngineFailedError("The engine has not started.")
        return self._running

    def lose(self, what: str) -> None:
        """Fail everything: vLLM is gone, or unfit to go on."""
        if self.closed or self._failure:
            return
        log.error("vLLM is lost", reason=what)
        self._fail("The engine behind this worker died.")
        if self._on_failure is not None:
            self._on_failure(EngineFailedError(self._failure))

    def _fail(self, message: str) -> None:
        self._failure = message
        self.ended.set()
        self._fail_all(message)

    async def close(self) -> None:
        """Stop vLLM's processes, also while they start."""
        if self.closed:
            return
        self.closed = True
        self._fail("The worker's engine was closed.")
        await self._start.end()
