"""Both of the library's clients behind one face, so that a test says once what holds for both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from millstream_client import Client, MillstreamError, SyncClient


@dataclass(frozen=True)
class Kind:
    """The client for asyncio, or the one without."""

    make: Any

    @property
    def sync(self) -> bool:
        return self.make is SyncClient

    async def run(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a method; one of a sync client in a thread, so that the loop can serve it."""
        if self.sync:
            return await asyncio.to_thread(method, *args, **named)
        result = method(*args, **named)
        return await result if asyncio.iscoroutine(result) else result

    @contextlib.asynccontextmanager
    async def connect(self, address: str, **settings: Any) -> AsyncIterator[Any]:
        client = self.make(address, **settings)
        try:
            yield client
        finally:
            await self.run(client.close)

    async def next(self, stream: Any) -> Any:
        """Read one delta."""
        return await (asyncio.to_thread(next, stream) if self.sync else anext(stream))

    def running(self, client: Any) -> Any:
        """Return the client's requests that run."""
        return (client._inner if self.sync else client).connection.running

    async def close(self, stream: Any) -> None:
        await self.run(stream.close if self.sync else stream.aclose)

    async def failure(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Run what must fail; answers how it did."""
        with pytest.raises(MillstreamError) as caught:
            await self.run(method, *args, **named)
        return caught.value


async def tell_serving(server: Any, *, serving: bool) -> None:
    """Have a server's health say so."""
    told = server.set_serving(serving=serving)
    if told is not None:
        await told


KINDS = [pytest.param(Kind(Client), id="async"), pytest.param(Kind(SyncClient), id="sync")]
