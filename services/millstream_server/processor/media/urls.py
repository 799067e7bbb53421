"""Fetches media that a client names by URL, or decodes what is in it.

The client chooses where this server connects, so all it could reach by that is refused: other
schemes and ports, addresses that aren't public, redirects to them, and names that are resolved to
something else the second time. There is one look-up per hop, and its result is both checked and
connected to. Time, pace and bytes are bounded.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING

from yarl import URL

from millstream_server.runtime.errors import (
    InvalidRequestError,
    MediaFetchError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.work.pool import WorkPool

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import ResolveResult

log = get_log(__name__)

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Returns all numeric addresses of a name."""

_PORTS = {"http": 80, "https": 443}
_MAX_URL = 8192
_MAX_SHOWN_SCHEME = 16
_CHUNK_BYTES = 64 << 10
_LONG_BYTES = 1 << 20
"""Of a file, or of a data URL: decoding so much takes 3 ms."""
_SECONDS_PER_CHAR = 3e-9
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAY_PASS = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_HEADERS = {"Accept": "image/*, video/*", "Accept-Encoding": "identity", "User-Agent": "millstream"}
_DATA = "data"
"""Of URLs that hold the file: `data:image/png;base64,...` (RFC 2397)."""
_MAX_DATA_HEADER = 256
"""Characters before the comma."""
_NOT_A_URL = "isn't a valid URL"
_NOT_ALLOWED = "names a host that this server doesn't fetch from"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBounds:
    """How long a fetch may take, and how many run."""

    timeout_s: float = 30.0
    """Longest time of a fetch, with its redirects."""
    min_bytes_per_s: int = 32 << 10
    """Slowest pace of a server, measured after ``slow_start_s``."""
    slow_start_s: float = 5.0
    """Time before the pace is measured."""
    max_redirects: int = 3
    concurrency: int = 16
    """Fetches at a time; others wait."""


DEFAULT_BOUNDS = FetchBounds()


_RESOLVING = ThreadPoolExecutor(8, "resolve")
"""A look-up can't be cancelled, so slow ones must not hold up the loop's other threads."""


async def resolve_by_system(host: str) -> Sequence[str]:
    """Look a name up as the system does."""
    look_up = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_RESOLVING, look_up)
    return [str(address[0]) for *_, address in found]


class UrlFetcher:
    """Fetches URLs, a bounded number at a time. Used in one event loop; nothing to close."""

    def __init__(
        self,
        *,
        enabled: bool,
        hosts: Sequence[str],
        max_bytes: int,
        pool: WorkPool,
        bounds: FetchBounds = DEFAULT_BOUNDS,
        resolve: Resolve = resolve_by_system,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Fetch http and https URLs if ``enabled``; ``data:`` URLs are decoded, in the ``pool``.

        With ``hosts``, HOST or HOST:PORT, from no others; these may have private addresses, and
        other ports than 80 and 443. ``tls`` has the CAs of https servers; the system's without one.
        """
        self._enabled = enabled
        self._hosts = frozenset(_entry(host) for host in hosts)
        self._max_bytes = max_bytes
        self._pool = pool
        self._bounds = bounds
        self._resolve = resolve
        self._tls = tls
        self._slots = asyncio.Semaphore(bounds.concurrency)

    async def fetch(
        self, url: str, field: str, take: Callable[[int], None] = lambda _: None
    ) -> bytes:
        """Return what a URL holds; ``field`` is its path in the request.

        ``take`` is called with the number of bytes as they come; what it raises ends the fetch.

        Raises:
            InvalidRequestError: the URL, where it leads or what is there can't be accepted.
            UnsupportedFeatureError: this server fetches no URLs.
            MediaFetchError: the server behind it failed or is too slow; a retry may succeed.
        """
        scheme = url[: _MAX_SHOWN_SCHEME + 1].partition(":")[0].lower()
        if scheme == _DATA:
            return await self._decoded(url, field, take)
        self._check_scheme(scheme, field)
        import aiohttp  # noqa: PLC0415 - takes 9 MB, and few servers fetch URLs

        async with self._slots:
            try:
                async with asyncio.timeout(self._bounds.timeout_s):
                    return await self._follow(_parse(url, field), field, take)
            except TimeoutError as error:
                sentence = f"was not delivered within {self._bounds.timeout_s:g} s"
                raise MediaFetchError(f"{field}: {sentence}") from error
            except (aiohttp.InvalidURL, UnicodeError) as error:
                raise InvalidRequestError.of(field, _NOT_A_URL) from error
            except (aiohttp.ClientError, OSError) as error:
                log.caused("media not fetched", field=field, reason=str(error))
                raise MediaFetchError(f"{field}: its server did not deliver it") from error

    async def _decoded(self, url: str, field: str, take: Callable[[int], None]) -> bytes:
        work = partial(decode_data_url, url, field, self._max_bytes)
        long = len(url) >= _LONG_BYTES
        data = await self._pool.run(work, len(url) * _SECONDS_PER_CHAR) if long else work()
        take(len(data))
        return data

    def _check_scheme(self, scheme: str, field: str) -> None:
        if scheme not in _PORTS:
            shown = f"has the scheme {scheme}" if scheme.isalnum() else "has no scheme"
            raise InvalidRequestError.of(field, f"{shown}; http, https and data URLs are accepted")
        if not self._enabled:
            raise UnsupportedFeatureError.of(
                field,
                f"is an {scheme} URL, and this server fetches none (--fetch-urls); send the bytes "
                "or a data URL",
            )

    async def _follow(self, url: URL, field: str, take: Callable[[int], None]) -> bytes:
        """Fetch, and follow redirects by hand: each is checked like the first URL."""
        for _ in range(self._bounds.max_redirects + 1):
            hop = await self._hop(url, field, take)
            if isinstance(hop, bytes):
                return hop
            if url.scheme == "https" and hop.scheme != "https":
                raise InvalidRequestError.of(field, "is redirected from https to http")
            url = hop
        sentence = f"is redirected more than {self._bounds.max_redirects} times, the most allowed"
        raise InvalidRequestError.of(field, sentence)

    async def _hop(self, url: URL, field: str, take: Callable[[int], None]) -> bytes | URL:
        """Return a URL's content, or where it is redirected to."""
        import aiohttp  # noqa: PLC0415 - see `fetch`

        resolver = self._checked_host(url, field)
        connector = aiohttp.TCPConnector(
            resolver=resolver,  # type: ignore[arg-type]
            use_dns_cache=False,
            force_close=True,
            ssl=self._tls or True,
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as session,
            session.get(url, headers=_HEADERS, allow_redirects=False) as response,
        ):
            if response.status in _REDIRECTS:
                return _redirected(url, response, field)
            self._check_response(response, field)
            return await self._read(response, field, take)

    def _checked_host(self, url: URL, field: str) -> _CheckedResolver:
        """Check what the URL itself says; the resolver that is returned checks the rest."""
        if url.scheme not in _PORTS:
            raise InvalidRequestError.of(field, "is redirected to a URL that isn't http or https")
        host, port = (url.raw_host or "").rstrip(".").lower(), url.port
        if not host:
            raise InvalidRequestError.of(field, "is a URL without a host")
        if url.raw_user is not None or url.raw_password is not None:
            raise InvalidRequestError.of(field, "has a user or a password in the URL; take it out")
        on_usual_port = port == _PORTS[url.scheme]
        allowed = (host, port) in self._hosts or (on_usual_port and (host, None) in self._hosts)
        if self._hosts and not allowed:
            raise InvalidRequestError.of(field, _NOT_ALLOWED)
        if not allowed and not on_usual_port:
            raise InvalidRequestError.of(
                field, f"names port {port}; {_PORTS[url.scheme]} is allowed with {url.scheme}"
            )
        if not allowed and _is_numeric(host) and not is_public(host):
            raise InvalidRequestError.of(field, _NOT_ALLOWED)
        return _CheckedResolver(self._resolve, field, allowed=allowed)

    def _check_response(self, response: aiohttp.ClientResponse, field: str) -> None:
        status = response.status
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _MAY_PASS:
            raise MediaFetchError(f"{field}: its server failed with status {status}")
        if status != HTTPStatus.OK:
            sentence = f"can't be fetched: its server responds with status {status}"
            raise InvalidRequestError.of(field, sentence)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            # A few kilobytes may become gigabytes; images and videos are compressed already.
            sentence = "is sent compressed (Content-Encoding), which isn't accepted"
            raise InvalidRequestError.of(field, sentence)
        if response.content_length is not None:
            self._check_bytes(response.content_length, field)

    def _check_bytes(self, nbytes: int, field: str) -> None:
        most = self._max_bytes
        if nbytes > most:
            # Without a length the server is stopped at the limit, so the file may be larger.
            raise InvalidRequestError.of(field, f"has {nbytes} bytes or more; {most} are allowed")

    async def _read(
        self, response: aiohttp.ClientResponse, field: str, take: Callable[[int], None]
    ) -> bytes:
        bounds, loop = self._bounds, asyncio.get_running_loop()
        pieces, came, began = list[bytes](), 0, loop.time()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            came += len(chunk)
            self._check_bytes(came, field)
            take(len(chunk))
            pieces.append(chunk)
            measured_s = loop.time() - began - bounds.slow_start_s
            if came < measured_s * bounds.min_bytes_per_s:
                raise MediaFetchError(
                    f"{field}: its server sends less than {bounds.min_bytes_per_s} bytes a second, "
                    "the least allowed"
                )
        if came < _LONG_BYTES:
            return b"".join(pieces)
        return await asyncio.to_thread(b"".join, pieces)


class _CheckedResolver:
    """Looks a name up once; what it returns is what is connected to. An `AbstractResolver`."""

    def __init__(self, resolve: Resolve, field: str, *, allowed: bool) -> None:
        self._resolve = resolve
        self._field = field
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Refuse the name if any of its addresses isn't public.

        Raises:
            InvalidRequestError: one isn't.
        """
        addresses = list(dict.fromkeys(await self._resolve(host)))
        if not self._allowed and not all(map(is_public, addresses)):
            raise InvalidRequestError.of(self._field, _NOT_ALLOWED)
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": socket.IPPROTO_TCP,
                "flags": socket.AI_NUMERICHOST,
            }
            for address in addresses
        ]

    async def close(self) -> None: ...


def _parse(url: str, field: str) -> URL:
    if len(url) > _MAX_URL:
        raise InvalidRequestError.of(field, f"has {len(url)} characters; {_MAX_URL} are allowed")
    try:
        if url.isprintable() and " " not in url:
            return URL(url)
    except ValueError:
        pass
    raise InvalidRequestError.of(field, _NOT_A_URL)


def _redirected(url: URL, response: aiohttp.ClientResponse, field: str) -> URL:
    location = response.headers.get("Location", "")
    if not location:
        raise InvalidRequestError.of(field, "is redirected, but not where to")
    try:
        return url.join(_parse(location, field))
    except ValueError as error:
        raise InvalidRequestError.of(field, "is redirected to an invalid URL") from error


def _is_numeric(host: str) -> bool:
    """Whether a host is an address in any notation; such a one is never looked up."""
    return ":" in host or host.replace(".", "").isdigit()


def _entry(text: str) -> tuple[str, int | None]:
    """Split HOST or HOST:PORT; an IPv6 address is in brackets."""
    url = URL(f"//{text}")
    return (url.raw_host or "").rstrip(".").lower(), url.explicit_port


# ---- data URLs -----------------------------------------------------------------------------------


def decode_data_url(url: str, field: str, max_bytes: int) -> bytes:
    """Return what a data URL holds; ``field`` is its path. 64 MiB take a tenth of a second.

    Raises:
        InvalidRequestError: it isn't base64, or has more than ``max_bytes``.
    """
    comma = url.find(",", 0, _MAX_DATA_HEADER)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise InvalidRequestError.of(
            field, "is a data URL without base64; write data:image/png;base64,..."
        )
    digits = len(url) - comma - 1 - url[-2:].count("=")
    nbytes = digits * 3 // 4
    if nbytes > max_bytes:
        raise InvalidRequestError.of(field, f"has {nbytes} bytes; {max_bytes} are allowed")
    if nbytes == 0:
        raise InvalidRequestError.of(field, "is a data URL without data")
    try:
        # Padding is optional in many clients' libraries.
        return base64.b64decode(
            url[comma + 1 :] + "=" * (-(len(url) - comma - 1) % 4), validate=True
        )
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError.of(field, "is a data URL whose base64 isn't valid") from error


# ---- addresses -----------------------------------------------------------------------------------

# Not public, but `is_global` of some Python versions says otherwise.
_SPECIAL = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")))
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether a numeric address is reached over the Internet.

    Any other would let a client read, through this server, what only its network can reach: cloud
    metadata, admin ports, neighbours.
    """
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv4Address):
        return _is_public_ipv4(found)
    embedded = _embedded(found)
    if embedded is not None:
        return _is_public_ipv4(embedded)
    ordinary = found in _GLOBAL_UNICAST and found.teredo is None
    return ordinary and found.is_global and found.scope_id is None


def _is_public_ipv4(address: IPv4Address) -> bool:
    special = address.is_multicast or address.is_reserved or address.is_unspecified
    return address.is_global and not special and not any(address in net for net in _SPECIAL)


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address at which a mapped, 6to4 or NAT64 address ends."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour
