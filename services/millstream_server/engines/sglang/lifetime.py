"""An SGLang engine from its start to its end, whatever it does with requests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import Metric

from millstream_server.control.engine import EngineLoad, Role
from millstream_server.engines.lifetime import EngineLifetime, InfoT
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.describe import with_media_model
from millstream_server.engines.sglang.kv_events.feed import with_publisher
from millstream_server.engines.sglang.launch import BuiltEngine, EngineThread
from millstream_server.engines.sglang.loads import KvBlocks, LoadReader, RankProgress
from millstream_server.engines.sglang.metrics import collect
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.telemetry.log import get_log


class ProcessWatch:
    """Reports the first loss of a child process, once.

    A child's pidfd becomes readable when it ends; and SGLang's children send SIGQUIT to this
    process on an exception. SGLang's handler for SIGQUIT kills this process and all its children,
    and so does the default.
    """

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        """Prepare; ``on_loss`` is called with a sentence for the log."""
        self._on_loss = on_loss
        self._pidfds: dict[int, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reported = False

    def catch_sigquit(self) -> None:
        """Handle SIGQUIT; call it on the main thread's loop before SGLang starts.

        Raises:
            EngineFailedError: the loop runs in another thread.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self._loop.add_signal_handler(
                signal.SIGQUIT, self._report, "a child process reported a failure (SIGQUIT)"
            )
        except (RuntimeError, ValueError) as error:
            message = "SGLang must be started from the main thread's event loop."
            raise EngineFailedError(message) from error

    def watch(self, pids: Iterable[int]) -> None:
        loop = asyncio.get_running_loop()
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._report(f"process {pid} was gone at once")
                return
            self._pidfds[pid] = descriptor
            loop.add_reader(descriptor, self._ended, pid)

    def _ended(self, pid: int) -> None:
        self._forget(pid)
        self._report(f"process {pid} ended")

    def _report(self, what: str) -> None:
        if not self._reported:
            self._reported = True
            self._on_loss(what)

    def _forget(self, pid: int) -> None:
        descriptor = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def stop(self) -> None:
        """Stop watching; may be called twice."""
        self._reported = True
        for pid in list(self._pidfds):
            self._forget(pid)
        if self._loop is not None:
            self._loop.remove_signal_handler(signal.SIGQUIT)
            self._loop = None


log = get_log(__name__)


class SglangLifetime(EngineLifetime[BuiltEngine, InfoT]):
    """Starts SGLang, notices its death, says how busy it is, and stops it.

    Order of calls: `start`, `started`, the others, `close`. `close` may be called twice and after a
    failed start. `start`, `started` and `ready` raise EngineFailedError: SGLang couldn't be loaded,
    has not started, or has ended.
    """

    def __init__(self, fail_all: Callable[[str], None], progress: RankProgress) -> None:
        """``fail_all`` is called once at the end, with why: it ends what is open."""
        super().__init__("SGLang", fail_all)
        self.blocks = KvBlocks(1, 0)
        """How the KV cache is divided; the engine sets it before `started`."""
        self._progress = progress
        self._loads = LoadReader()
        self._thread = EngineThread()
        self._watch = ProcessWatch(self.lose)
        self._responses: asyncio.Task[None] | None = None

    async def start(self, config: SglangEngineConfig) -> BuiltEngine:
        """Load the model in a thread of its own."""
        self._watch.catch_sigquit()
        built = await self._thread.build(config)
        self._receive_responses(built.engine.tokenizer_manager)
        self._watch.watch(built.engine.get_all_child_pids())
        self._progress.read_loads_from(built.engine.tokenizer_manager.load_snapshot_reader)
        return built

    async def load(self, open_requests: int, *, may_wake: bool = True) -> EngineLoad:
        manager = self.ready()[0].engine.tokenizer_manager
        return await self._loads.read(
            manager, self.blocks, open_requests=open_requests, may_wake=may_wake
        )

    def metrics(self) -> Iterable[Metric]:
        return () if self._running is None else collect(self.blocks)

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

    async def close(self, tasks: Callable[[], Iterable[asyncio.Task[Any]]]) -> None:
        """Stop SGLang's processes, also while they start; wait for ``tasks`` before that."""
        if not self._end():
            return
        waiting = set(tasks())
        if self._responses is not None:
            self._responses.cancel()
            waiting.add(self._responses)
        if waiting:
            await asyncio.wait(waiting)
        await self._thread.end()
        self._watch.stop()


class SglangFollower:
    """SGLang's scheduler processes of one rank above 0; see `worker.follower.Follower`.

    Such an engine has no tokenizer manager: its schedulers get requests from those of rank 0.
    """

    def __init__(self, config: SglangEngineConfig) -> None:
        self._config = config
        self._thread = EngineThread()
        self._watch: ProcessWatch | None = None
        self._closed = False

    async def start(self, on_end: Callable[[str], None]) -> None:
        """Load this rank's part of the model, which ends when those of all ranks are loaded."""
        self._watch = ProcessWatch(on_end)
        self._watch.catch_sigquit()
        config = self._config
        if config.role is not Role.EMBEDDING:
            config, _ = with_media_model(config)  # all ranks need the same arguments
            config = with_publisher(config)
        self._watch.watch(await self._thread.follow(config))

    async def close(self) -> None:
        """Stop SGLang's processes, also while they start; may be called twice."""
        if self._closed:
            return
        self._closed = True
        await self._thread.end()
        if self._watch is not None:
            self._watch.stop()
