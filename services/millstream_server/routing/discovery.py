"""Discovery of workers' addresses: a fixed list, a DNS name, or a file; changes are followed."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

DNS_INTERVAL_S = 5.0
FILE_INTERVAL_S = 1.0
_JITTER = 0.2
"""Share by which intervals vary, so that Processors don't query all at the same time."""
_MAX_PORT = 65535

Addresses = frozenset[str]


class Discovery(Protocol):
    """Finds workers."""

    def watch(self) -> AsyncIterator[Addresses]:
        """Yield the addresses of all workers, HOST:PORT, at the start and after each change.

        If the source can't be read, nothing is yielded and the last addresses stay valid; likewise
        when the iteration ends. Called once.
        """
        ...


class StaticDiscovery:
    """A fixed list."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Yield these addresses only."""
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncIterator[Addresses]:
        """See `Discovery.watch`."""
        yield self._addresses


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
        failed = ""
        while True:
            try:
                found = await self._look_up()
            except (OSError, UnicodeError) as error:
                if str(error) != failed:
                    failed = str(error)
                    log.warning("name of the workers not resolved", host=self._host, reason=failed)
            else:
                failed = ""
                if found != known:
                    yield found
                known = found
            await _pause(self._interval_s)

    async def _look_up(self) -> Addresses:
        found = await asyncio.get_running_loop().getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        )
        return frozenset(_join(str(address[0]), self._port) for *_, address in found)


class FileDiscovery:
    """A file with one address per line; blank lines and lines that begin with # are ignored."""

    def __init__(self, path: Path, *, interval_s: float = FILE_INTERVAL_S) -> None:
        """Read ``path`` about every ``interval_s``.

        Raises:
            SettingsError: it can't be read now.
        """
        self._path = path
        self._interval_s = interval_s
        self._first = self._read()

    async def watch(self) -> AsyncIterator[Addresses]:
        """See `Discovery.watch`."""
        known = self._first
        yield known
        failed = ""
        while True:
            await _pause(self._interval_s)
            try:
                found = await asyncio.to_thread(self._read)
            except SettingsError as error:
                if str(error) != failed:
                    failed = str(error)
                    log.warning("file of the workers not read", reason=failed)
            else:
                failed = ""
                if found != known:
                    yield found
                known = found

    def _read(self) -> Addresses:
        try:
            lines = [line.strip() for line in self._path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(f"--workers: can't read {self._path}: {reason}") from error
        return frozenset(
            _checked(line, f"{self._path}, line {number}: ")
            for number, line in enumerate(lines, 1)
            if line and not line.startswith("#")
        )


def make_discovery(workers: Sequence[str]) -> Discovery:
    """Make the discovery for `--workers`: HOST:PORT,… or one dns:NAME:PORT or one file:PATH.

    Raises:
        SettingsError: it is none of these, or the file can't be read.
    """
    if not workers:
        raise SettingsError("--workers: name at least one worker, HOST:PORT,…")
    kind, _, rest = workers[0].partition(":")
    special = [entry for entry in workers if entry.startswith(("dns:", "file:"))]
    if special and len(workers) > 1:
        raise SettingsError(
            f"--workers: {special[0]!r} stands alone; no other workers can be named beside it"
        )
    if kind == "file":
        if not rest:
            raise SettingsError("--workers: 'file:' needs a path, file:PATH")
        return FileDiscovery(Path(rest))
    if kind == "dns" and special:
        host, _, port = rest.rpartition(":")
        if not host or "/" in rest or not _is_port(port):
            raise SettingsError(f"--workers: {workers[0]!r} is not dns:NAME:PORT")
        return DnsDiscovery(host, int(port))
    return StaticDiscovery([_checked(entry) for entry in workers])


def _checked(address: str, where: str = "") -> str:
    host, _, port = address.rpartition(":")
    if not host or not _is_port(port):
        raise SettingsError(f"--workers: {where}{address!r} is not HOST:PORT")
    return address


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_PORT


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _pause(interval_s: float) -> None:
    await asyncio.sleep(interval_s * random.uniform(1 - _JITTER, 1 + _JITTER))  # noqa: S311
