"""What every kind of discovery has in common."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.settings.declare import is_host_port
from millstream_server.runtime.telemetry.log import Log, get_log
from millstream_server.runtime.telemetry.metrics import DISCOVERY_FAILURES

log = get_log(__name__)

FIRST_PAUSE_S = 1.0
_MOST_PAUSE_S = 30.0
_JITTER = 0.2
"""Share by which intervals vary, so that Processors don't query all at the same time."""

Addresses = frozenset[str]


class Discovery(Protocol):
    """Finds workers."""

    def watch(self) -> AsyncIterator[Addresses]:
        """Yield the addresses of all workers, HOST:PORT, at the start and after each change.

        If the source can't be read, nothing is yielded and the last addresses stay valid; likewise
        when the iteration ends. Called again only after it has raised: it reads the source anew.
        """
        ...


async def follow(discovery: Discovery, take: Callable[[Addresses], None]) -> None:
    """Call ``take`` with the workers at the start and after each change.

    An unexpected exception, also of ``take``, is logged and counted, and the watch starts again
    after a pause: 1 s, doubled each time up to 30 s. Returns when the watch ends.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        began_s = time.monotonic()
        try:
            async for addresses in discovery.watch():
                take(addresses)
        except Exception as error:  # noqa: BLE001 - a bug in one source must not stop the others
            if time.monotonic() - began_s > _MOST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            DISCOVERY_FAILURES.inc()
            log.error(
                "discovery failed; the known workers are kept, and it starts again",
                source=type(discovery).__name__,
                pause_s=pause_s,
                error=error,
            )
            await pause(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        else:
            return


class Failures:
    """Warns of a source that can't be read, once per cause."""

    def __init__(self, log: Log, event: str, **fields: Any) -> None:
        """Log ``event`` with these fields and the reason."""
        self._log = log
        self._event = event
        self._fields = fields
        self._reason = ""

    def failed(self, reason: object) -> None:
        """Warn, unless the last failure had the same reason."""
        if str(reason) != self._reason:
            self._reason = str(reason)
            self._log.warning(self._event, **self._fields, reason=self._reason)

    def over(self) -> None:
        """Note that the source was read."""
        self._reason = ""


def checked_address(address: str, where: str = "") -> str:
    """Return ``address`` if it is HOST:PORT, where an IPv6 address has brackets.

    Raises:
        SettingsError: it is not; ``where`` begins the sentence.
    """
    if not is_host_port(address):
        raise SettingsError(f"--workers: {where}{address!r} is not HOST:PORT")
    return address


def join(host: str, port: int) -> str:
    """Return HOST:PORT; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def pause(interval_s: float) -> None:
    """Sleep about ``interval_s``."""
    await asyncio.sleep(interval_s * random.uniform(1 - _JITTER, 1 + _JITTER))  # noqa: S311
