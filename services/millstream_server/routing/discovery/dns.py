"""The workers that a DNS name resolves to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

from millstream_server.routing.discovery.base import Addresses, Failures, join, pause
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

DNS_INTERVAL_S = 5.0


class DnsDiscovery:
    """The addresses that a DNS name resolves to, such as a headless Kubernetes service's."""

    def __init__(self, host: str, port: int, *, interval_s: float = DNS_INTERVAL_S) -> None:
        """Resolve ``host`` about every ``interval_s``; all workers listen on ``port``."""
        self._host = host
        self._port = port
        self._interval_s = interval_s

    async def watch(self) -> AsyncIterator[Addresses]:
        """See `Discovery.watch`."""
        known: Addresses | None = None
        failures = Failures(log, "name of the workers not resolved", host=self._host)
        while True:
            try:
                found = await self._look_up()
            except (OSError, UnicodeError) as error:
                failures.failed(error)
            else:
                failures.over()
                if found != known:
                    yield found
                known = found
            await pause(self._interval_s)

    async def _look_up(self) -> Addresses:
        found = await asyncio.get_running_loop().getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        )
        return frozenset(join(str(address[0]), self._port) for *_, address in found)
