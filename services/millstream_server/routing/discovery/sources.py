"""Where the Processor's workers are, by `--workers`: lists, files, DNS names, and several merged.

`kubernetes.py` beside it follows Kubernetes services.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.settings.declare import is_host_port, is_port
from millstream_server.runtime.telemetry.log import Log, get_log
from millstream_server.runtime.telemetry.metrics import DISCOVERY_FAILURES, DISCOVERY_SOURCE_FAILING

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
    """Warns of a source that can't be read, once per cause, and says when it can again."""

    def __init__(self, log: Log, event: str, source: str) -> None:
        """``source`` is a host, service or file of `--workers`; it labels the metric, too."""
        self._log = log
        self._event = event
        self._source = source
        self._reason = ""
        self._failing = DISCOVERY_SOURCE_FAILING.labels(source)

    def failed(self, reason: object) -> None:
        """Warn, unless the last failure had the same reason."""
        self._failing.set(1)
        if str(reason) != self._reason:
            self._reason = str(reason)
            self._log.warning(self._event, source=self._source, reason=self._reason)

    def over(self) -> None:
        self._failing.set(0)
        if self._reason:
            self._log.info("workers are found again", source=self._source, after=self._reason)
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


@dataclass(frozen=True, slots=True)
class StaticDiscovery:
    """A fixed list."""

    addresses: Iterable[str]

    async def watch(self) -> AsyncIterator[Addresses]:
        yield frozenset(self.addresses)


DNS_INTERVAL_S = 5.0
_ROUND_S = DNS_INTERVAL_S * (1 + _JITTER)


def round_s(discovery: Discovery) -> float:
    """Return how long it takes at most to find a worker that can be found; 0: it finds no other."""
    return 0.0 if isinstance(discovery, StaticDiscovery) else _ROUND_S


@dataclass(frozen=True, slots=True)
class DnsDiscovery:
    """The addresses that a DNS name resolves to, such as a headless Kubernetes service's.

    It is resolved about every ``interval_s``; all workers listen on ``port``.
    """

    host: str
    port: int
    interval_s: float = field(default=DNS_INTERVAL_S, kw_only=True)

    async def watch(self) -> AsyncIterator[Addresses]:
        known: Addresses | None = None
        failures = Failures(log, "name of the workers not resolved", self.host)
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
            await pause(self.interval_s)

    async def _look_up(self) -> Addresses:
        found = await asyncio.get_running_loop().getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM
        )
        return frozenset(join(str(address[0]), self.port) for *_, address in found)


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
        yield self._known
        failures = Failures(log, "file of the workers not read", str(self._path))
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


_News = asyncio.Queue[tuple[int, Addresses | None]]


@dataclass(frozen=True, slots=True)
class MergedDiscovery:
    """The workers of all ``sources``; one that fails doesn't hinder the others."""

    sources: Sequence[Discovery]

    async def watch(self) -> AsyncGenerator[Addresses, None]:
        news: _News = asyncio.Queue()
        tasks = [
            asyncio.ensure_future(_report(number, source, news))
            for number, source in enumerate(self.sources)
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


_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_KUBERNETES_NAME = re.compile(rf"(?:(?P<namespace>{_LABEL})/)?(?P<service>{_LABEL})")


def make_discovery(workers: Sequence[str]) -> Discovery:
    """Make the discovery for the entries of `--workers`; several are merged.

    An entry is HOST:PORT, dns:NAME:PORT, k8s:SERVICE, k8s:NAMESPACE/SERVICE or file:PATH.

    Raises:
        SettingsError: one is none of these, its file can't be read, or this is no cluster.
    """
    if not workers:
        raise SettingsError("--workers: name at least one worker, HOST:PORT,…")
    listed: list[str] = []
    sources: list[Discovery] = []
    for entry in dict.fromkeys(workers):
        kind, _, rest = entry.partition(":")
        if (make := _KINDS.get(kind)) and not (rest.isdecimal() and is_port(rest)):
            sources.append(make(rest))
        else:
            listed.append(checked_address(entry))
    if listed:
        sources.insert(0, StaticDiscovery(listed))
    return sources[0] if len(sources) == 1 else MergedDiscovery(sources)


def _dns(rest: str) -> DnsDiscovery:
    host, _, port = rest.rpartition(":")
    if not host or "/" in rest or not is_port(port):
        raise SettingsError(f"--workers: 'dns:{rest}' is not dns:NAME:PORT")
    return DnsDiscovery(host, int(port))


def _file(rest: str) -> FileDiscovery:
    if not rest:
        raise SettingsError("--workers: 'file:' needs a path, file:PATH")
    return FileDiscovery(Path(rest))


def _kubernetes(rest: str) -> Discovery:
    # Imported where it is used: its HTTP client takes 9 MB.
    from millstream_server.routing.discovery.kubernetes import KubernetesDiscovery  # noqa: PLC0415

    name = _KUBERNETES_NAME.fullmatch(rest)
    if name is None:
        raise SettingsError(
            f"--workers: 'k8s:{rest}' is not k8s:SERVICE or k8s:NAMESPACE/SERVICE; "
            "the port is the service's own, named grpc"
        )
    return KubernetesDiscovery(name["service"], name["namespace"] or "")


_KINDS: dict[str, Callable[[str], Discovery]] = {"dns": _dns, "file": _file, "k8s": _kubernetes}
