"""A process that runs a part of a model whose requests another process serves."""

from __future__ import annotations

from collections.abc import Callable

from millstream_server.engines.base import Role
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.describe import with_media_model
from millstream_server.engines.sglang.kv_events.feed import with_publisher
from millstream_server.engines.sglang.launch import EngineThread
from millstream_server.engines.sglang.watch import ProcessWatch
from millstream_server.runtime.errors import EngineFailedError


class SglangFollower:
    """SGLang's scheduler processes of one rank above 0; see `worker.follower.Follower`.

    Such an engine has no tokenizer manager: its schedulers get requests from those of rank 0.
    """

    def __init__(self, config: SglangEngineConfig) -> None:
        """Start nothing yet, import nothing of SGLang."""
        self._config = config
        self._thread = EngineThread()
        self._watch: ProcessWatch | None = None
        self._closed = False

    async def start(self, on_end: Callable[[str], None]) -> None:
        """Load this rank's part of the model, which ends when those of all ranks are loaded."""
        self._watch = ProcessWatch(on_end)
        try:
            self._watch.catch_sigquit()
        except (RuntimeError, ValueError) as error:
            message = "SGLang must be started from the main thread's event loop."
            raise EngineFailedError(message) from error
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
