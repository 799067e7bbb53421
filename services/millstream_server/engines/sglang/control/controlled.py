"""A running SGLang engine from the side of the operations."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from millstream_server.engines.gate import Hold
from millstream_server.engines.operations import refuse_open, until_flushed
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.kv_events.feed import KvEventFeed
from millstream_server.engines.sglang.launch import BuiltEngine
from millstream_server.engines.sglang.lifetime import SglangLifetime
from millstream_server.engines.sglang.requests.runs import Runs
from millstream_server.generation.generator import GeneratorInfo

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ControlledEngine:
    """What all operations use."""

    config: SglangEngineConfig
    built: BuiltEngine
    info: GeneratorInfo
    runs: Runs
    lifetime: SglangLifetime[GeneratorInfo]
    kv: KvEventFeed
    _calls: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def manager(self) -> Any:
        return self.built.engine.tokenizer_manager

    @property
    def messages(self) -> Any:
        """The module with SGLang's messages to its schedulers."""
        return importlib.import_module("sglang.srt.managers.io_struct")

    def argument(self, name: str) -> Any:
        """Return a value of SGLang's ServerArgs as it resolved it."""
        return self.built.server_args.get(name)

    async def call(self, call: Coroutine[Any, Any, T]) -> T:
        """Await one of SGLang's own coroutines; it goes on when this one is cancelled.

        SGLang waits for ever for a scheduler that died, and gives the reply to a call that was
        cancelled to the next one.

        Raises:
            EngineFailedError: the engine was lost.
        """
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._forget)
        return await self.lifetime.answer(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # whoever called may be gone

    async def flush_cache(self) -> None:
        """See `control.pause.CacheControl`; waits until SGLang has released requests that ended.

        A flush is how to ask SGLang whether it is idle: it refuses while anything is left.

        Raises:
            EngineBusyError: requests are running, or SGLang doesn't release them.
        """
        await until_flushed(self._flush)

    async def _flush(self) -> bool:
        there = self.runs.at_engine()
        paused = self.runs.gate.holds(Hold.PAUSED)  # then it releases none
        refuse_open(sum(paused or not run.over for run in there))
        if there:
            return False
        manager, message = self.manager, self.messages.FlushCacheReqInput
        results = await self.call(manager.flush_cache_communicator(message()))
        if not all(result.success for result in results):
            return False
        if manager.mm_processor is not None:
            manager.mm_processor.clear_preprocess_cache()
        return True
