"""What every kind of discovery has in common."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Protocol

from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.settings.addresses import is_host_port
from millstream_server.runtime.telemetry.log import Log

_JITTER = 0.2
"""Share by which intervals vary, so that Processors don't query all at the same time."""

Addresses = frozenset[str]


class Discovery(Protocol):
    """Finds workers."""

    def watch(self) -> AsyncIterator[Addresses]:
        """Yield the addresses of all workers, HOST:PORT, at the start and after each change.

        If the source can't be read, nothing is yielded and the last addresses stay valid; likewise
        when the iteration ends. Called once.
        """
        ...


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
