"""Several sources of workers as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from millstream_server.routing.discovery.base import Addresses, Discovery
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_News = asyncio.Queue[tuple[int, Addresses | None]]


class MergedDiscovery:
    """The workers of all ``sources``; one that can't be read doesn't hinder the others."""

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
    try:
        async for addresses in source.watch():
            news.put_nowait((number, addresses))
    except Exception as error:  # noqa: BLE001 - the other sources outlive it
        log.error("a source of workers failed; those it named are kept", error=error)
    news.put_nowait((number, None))
