"""The threads for templates and tokenizers, shared by chats and batches of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class TextThreads:
    """Runs text work off the event loop.

    Batches get all threads but one, and take turns: however many there are, a chat waits for one
    piece of work at most.
    """

    def __init__(self, threads: int) -> None:
        """Start no thread before it is needed."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._batches = asyncio.Semaphore(max(1, threads - 1))

    async def run(self, work: Callable[[], T]) -> T:
        """Run one piece of work."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def in_turns(self, pieces: Iterable[Callable[[], T]]) -> list[T]:
        """Run a batch's pieces one after another; other batches' may run in between."""
        results = []
        for piece in pieces:
            async with self._batches:
                results.append(await self.run(piece))
        return results

    def close(self) -> None:
        """Start no further work."""
        self._executor.shutdown(wait=False, cancel_futures=True)
