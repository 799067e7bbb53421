"""A fixed list of workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from millstream_server.routing.discovery.base import Addresses


class StaticDiscovery:
    """A fixed list."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Yield these addresses only."""
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncIterator[Addresses]:
        """See `Discovery.watch`."""
        yield self._addresses
