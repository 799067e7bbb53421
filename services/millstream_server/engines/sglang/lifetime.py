"""An SGLang engine from its start to its end, whatever it does with requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.launch import BuiltEngine, EngineThread
from millstream_server.engines.sglang.watch import ProcessWatch
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


class SglangLifetime:
    """Starts SGLang, notices its death, and stops it.

    Order of calls: `start`, `started`, `close`. `close` may be called twice and after a failed
    start.
    """

    def __init__(self, fail_all: Callable[[str], None]) -> None:
        """``fail_all`` is called once at the end, with why: it ends what is open."""
        self.failure = ""
        """Why the engine doesn't work any more; empty: it does, or has not started."""
        self.ended = asyncio.Event()
        """Set when there is such a failure."""
        self._fail_all = fail_all
        self._thread = EngineThread()
        self._watch = ProcessWatch(self.lose)
        self._responses: asyncio.Task[None] | None = None
        self._on_failure: Callable[[ServingError], None] | None = None
        self._closed = False

    async def start(self, config: SglangEngineConfig) -> BuiltEngine:
        """Load the model in a thread of its own.

        Raises:
            EngineFailedError: it couldn't be loaded.
        """
        try:
            self._watch.catch_sigquit()
        except (RuntimeError, ValueError) as error:
            message = "SGLang must be started from the main thread's event loop."
            raise EngineFailedError(message) from error
        built = await self._thread.build(config)
        self._receive_responses(built.engine.tokenizer_manager)
        self._watch.watch(built.engine.get_all_child_pids())
        return built

    def started(self, on_failure: Callable[[ServingError], None]) -> None:
        """Report a later death to ``on_failure``, once.

        Raises:
            EngineFailedError: it has died already.
        """
        if self.failure:
            raise EngineFailedError(self.failure)
        self._on_failure = on_failure

    def _receive_responses(self, manager: Any) -> None:
        """Run SGLang's response loop ourselves.

        `auto_create_handle_loop` would start it with the first request, and with it take over
        SIGTERM and SIGQUIT, and kill this process when the loop hits an exception.
        """
        manager.event_loop = asyncio.get_running_loop()
        self._responses = asyncio.create_task(manager.handle_loop(), name="sglang-responses")
        self._responses.add_done_callback(self._responses_ended)

    def _responses_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.error("SGLang's response loop ended", error=task.exception())
            self.lose("its response loop ended")

    def lose(self, what: str) -> None:
        """Fail everything: a part of SGLang is gone, or unfit to go on."""
        if self._closed or self.failure:
            return
        log.error("SGLang is lost", reason=what)
        self._fail("The engine behind this worker died.")
        if self._on_failure is not None:
            self._on_failure(EngineFailedError(self.failure))

    def _fail(self, message: str) -> None:
        self.failure = message
        self.ended.set()
        self._fail_all(message)

    async def close(self, tasks: Callable[[], Iterable[asyncio.Task[Any]]]) -> None:
        """Stop SGLang's processes, also while they start; wait for ``tasks`` before that."""
        if self._closed:
            return
        self._closed = True
        self._fail("The worker's engine was closed.")
        waiting = set(tasks())
        if self._responses is not None:
            self._responses.cancel()
            waiting.add(self._responses)
        if waiting:
            await asyncio.wait(waiting)
        await self._thread.end()
        self._watch.stop()
