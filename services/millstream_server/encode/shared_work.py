"""Work that several callers wait for at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True)
class _Shared(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SharedWork(Generic[K, T]):
    """Runs one task per key for all who wait for it. For one event loop.

    It is cancelled when nobody waits any more. Who comes after its end starts another one.
    """

    def __init__(self, discard: Callable[[T], None] = lambda _: None) -> None:
        """``discard`` gets a result when all who waited for it have had it."""
        self._discard = discard
        self._running: dict[K, _Shared[T]] = {}

    def __contains__(self, key: K) -> bool:
        shared = self._running.get(key)
        return shared is not None and not shared.task.done()

    @contextlib.asynccontextmanager
    async def result(self, key: K, start: Callable[[], Coroutine[Any, Any, T]]) -> AsyncIterator[T]:
        """Wait for a key's result, which is valid in the ``with`` block."""
        shared = self._running.get(key)
        if shared is None or shared.task.done():
            shared = self._running[key] = _Shared(asyncio.create_task(start()))
        shared.waiting += 1
        try:
            yield await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if not shared.waiting:
                self._end(key, shared)

    def cancel(self) -> None:
        """Stop all tasks."""
        for shared in self._running.values():
            shared.task.cancel()

    def _end(self, key: K, shared: _Shared[T]) -> None:
        if self._running.get(key) is shared:
            del self._running[key]
        task = shared.task
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            self._discard(task.result())
