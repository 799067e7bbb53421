"""Several sources of workers as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from millstream_server.routing.discovery.base import Addresses, Discovery, follow

_News = asyncio.Queue[tuple[int, Addresses | None]]


class MergedDiscovery:
    """The workers of all ``sources``; one that fails doesn't hinder the others."""

    def __init__(self, sources: Sequence[Discovery]) -> None:
        """Watch these."""
        self._sources = sources

    async def watch(self) -> AsyncGenerator[Addresses, None]:
        """See `Discovery.watch`."""
        news: _News = asyncio.Queue()
        tasks = [
            asyncio.ensure_future(_report(number, source, news))
            for number, source in enumerate(self._sources)
        ]
        known: Addresses | None = None
        found: dict[int, Addresses] = {}
        going = len(tasks)
        try:
            while going:
                number, addresses = await news.get()
                if addresses is None:
                    going -= 1
                    continue
                found[number] = addresses
                merged = Addresses().union(*found.values())
                if merged != known:
                    yield merged
                known = merged
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _report(number: int, source: Discovery, news: _News) -> None:
    """Put what a source finds into ``news``; None when it has ended."""
    await follow(source, lambda addresses: news.put_nowait((number, addresses)))
    news.put_nowait((number, None))
