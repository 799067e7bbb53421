"""The workers that a file lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from millstream_server.routing.discovery.base import Addresses, Failures, checked_address, pause
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

FILE_INTERVAL_S = 1.0


class FileDiscovery:
    """A file with one address per line; blank lines and lines that begin with # are ignored."""

    def __init__(self, path: Path, *, interval_s: float = FILE_INTERVAL_S) -> None:
        """Read ``path`` about every ``interval_s``.

        Raises:
            SettingsError: it can't be read now.
        """
        self._path = path
        self._interval_s = interval_s
        self._known = self._read()

    async def watch(self) -> AsyncIterator[Addresses]:
        """See `Discovery.watch`."""
        yield self._known
        failures = Failures(log, "file of the workers not read")
        while True:
            await pause(self._interval_s)
            try:
                found = await asyncio.to_thread(self._read)
            except SettingsError as error:
                failures.failed(error)
            else:
                failures.over()
                if found != self._known:
                    self._known = found
                    yield found

    def _read(self) -> Addresses:
        try:
            lines = [line.strip() for line in self._path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(f"--workers: can't read {self._path}: {reason}") from error
        return frozenset(
            checked_address(line, f"{self._path}, line {number}: ")
            for number, line in enumerate(lines, 1)
            if line and not line.startswith("#")
        )
