"""Fetching what clients name by URL, from servers that lie, drip and redirect."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from millstream_server.processor.media import urls
from millstream_server.processor.media.urls import FetchBounds, UrlFetcher, is_public
from millstream_server.runtime.errors import (
    InvalidRequestError,
    MediaFetchError,
    OverloadedError,
    ServingError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool
from millstream_testing.waiting import until
from tests.support.telemetry.logged import events
from tests.support.wire.certificates import Authority

FIELD = "messages[0].content[1].url"
NOT_ALLOWED = "names a host that this server doesn't fetch from"
BODY = b"\x89PNG" + bytes(5000)
OK = b"HTTP/1.1 200 OK\r\n"
MAX_BYTES = 10_000
POOL = WorkPool(PoolLimits())

Respond = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class _Watched(WorkPool):
    """A pool that keeps the estimates of its work."""

    def __init__(self, limits: PoolLimits) -> None:
        super().__init__(limits)
        self.estimates: list[float] = []

    async def run(self, work: Callable[[], Any], seconds: float, *, batch: bool = False) -> Any:
        self.estimates.append(seconds)
        return await super().run(work, seconds, batch=batch)


@dataclass
class _Server:
    port: int = 0
    requests: list[str] = field(default_factory=list)
    """The heads of all requests."""
    open: int = 0

    def url(self, path: str = "/a.png", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"


@asynccontextmanager
async def _serving(
    respond: Respond, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[_Server]:
    """Serve raw bytes: ``respond`` gets a request's path."""
    found = _Server()

    handling: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        found.open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                found.requests.append(head)
                await respond(head.split()[1], writer)
                await writer.drain()
        finally:
            writer.close()
            found.open -= 1
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, host, 0, ssl=tls)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found
        for task in handling:
            task.cancel()
        await asyncio.gather(*handling, return_exceptions=True)


def _fixed(response: bytes) -> Respond:
    async def respond(_path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response)

    return respond


def _with_length(body: bytes = BODY, *headers: bytes) -> bytes:
    lines = [b"Content-Length: %d" % len(body), *headers]
    return OK + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def _redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\n\r\n".encode()


def _names(**addresses: Sequence[str]) -> urls.Resolve:
    """Return a resolver of invented names."""

    async def resolve(host: str) -> Sequence[str]:
        return addresses[host.replace(".", "_")]

    return resolve


def _fetcher(
    *hosts: str,
    bounds: FetchBounds = urls.DEFAULT_BOUNDS,
    resolve: urls.Resolve = urls.resolve_by_system,
    tls: ssl.SSLContext | None = None,
) -> UrlFetcher:
    return UrlFetcher(
        enabled=True,
        hosts=hosts,
        max_bytes=MAX_BYTES,
        pool=POOL,
        bounds=bounds,
        resolve=resolve,
        tls=tls,
    )


async def _refusal(fetcher: UrlFetcher, url: str) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        await fetcher.fetch(url, FIELD)
    (violation,) = refused.value.violations
    assert violation.field == FIELD
    return violation.description


async def _failure(fetcher: UrlFetcher, url: str) -> str:
    with pytest.raises(MediaFetchError) as failed:
        await fetcher.fetch(url, FIELD)
    assert failed.value.retryable
    at, _, sentence = failed.value.message.partition(": ")
    assert at == FIELD
    return sentence


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> Callable[[_Server], None]:
    """Return how to let 127.0.0.2 be a public address, and a server's port that of http."""
    real = is_public
    monkeypatch.setattr(urls, "is_public", lambda address: address == "127.0.0.2" or real(address))

    def use(server: _Server) -> None:
        monkeypatch.setattr(urls, "_PORTS", {"http": server.port, "https": server.port})

    return use


# ---- what is fetched -----------------------------------------------------------------------------


async def test_a_file_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with _serving(_fixed(_with_length(BODY, b"Set-Cookie: a=b"))) as server:
        fetcher = _fetcher(f"127.0.0.1:{server.port}")
        assert await fetcher.fetch(server.url(), FIELD) == BODY
        assert await fetcher.fetch(server.url(), FIELD) == BODY
    for head in server.requests:
        assert head.startswith("GET /a.png HTTP/1.1\r\n")
        lines = {line.partition(":")[0].lower() for line in head.splitlines()[1:] if line}
        assert lines == {"host", "accept", "accept-encoding", "user-agent", "connection"}
        assert "Accept-Encoding: identity" in head


async def test_chunks_and_a_body_that_ends_with_the_connection() -> None:
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
    for response in (chunked, OK + b"\r\nhello world"):
        async with _serving(_fixed(response)) as server:
            fetcher = _fetcher(f"127.0.0.1:{server.port}")
            assert await fetcher.fetch(server.url(), FIELD) == b"hello world"


async def test_bytes_are_counted_as_they_come_and_may_be_refused() -> None:
    async with _serving(_fixed(_with_length())) as server:
        fetcher, came = _fetcher(f"127.0.0.1:{server.port}"), list[int]()
        await fetcher.fetch(server.url(), FIELD, came.append)
        assert sum(came) == len(BODY)

        def refuse(size: int) -> None:
            raise OverloadedError(f"no room for {size}")

        with pytest.raises(OverloadedError, match="no room for"):
            await fetcher.fetch(server.url(), FIELD, refuse)


async def test_a_failure_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{closed.getsockname()[1]}"
    await _failure(_fetcher(host), f"http://{host}/a.png")
    (event,) = events(caplog, "media not fetched")
    assert event["field"] == FIELD
    assert "Connect" in event["reason"]
    assert not any(record.exc_info for record in caplog.records)


async def test_https() -> None:
    authority = Authority()
    issued = authority.issue("images.example")
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(theirs, issued.cert, issued.key)
    ours = ssl.create_default_context(cadata=authority.pem.decode())
    names = _names(images_example=["127.0.0.1"], other_example=["127.0.0.1"])
    async with _serving(_fixed(_with_length()), tls=theirs) as server:
        hosts = (f"images.example:{server.port}", f"other.example:{server.port}")
        url = server.url(host="images.example", scheme="https")
        assert await _fetcher(*hosts, resolve=names, tls=ours).fetch(url, FIELD) == BODY
        did_not = "its server did not deliver it"
        assert await _failure(_fetcher(*hosts, resolve=names), url) == did_not
        other = server.url(host="other.example", scheme="https")
        assert await _failure(_fetcher(*hosts, resolve=names, tls=ours), other) == did_not


def _load(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    import tempfile  # noqa: PLC0415 - ssl reads files only

    with tempfile.NamedTemporaryFile() as file:
        file.write(cert + key)
        file.flush()
        context.load_cert_chain(file.name)


async def test_a_redirect_is_followed_and_relative_ones_too() -> None:
    async def respond(path: str, writer: asyncio.StreamWriter) -> None:
        onward = {"/1": "/2?x=1", "/2?x=1": "3", "/3": server.url("/4")}
        writer.write(_redirect(onward[path]) if path in onward else _with_length())

    async with _serving(respond) as server:
        fetcher = _fetcher(f"127.0.0.1:{server.port}")
        assert await fetcher.fetch(server.url("/1"), FIELD) == BODY
    assert [head.split()[1] for head in server.requests] == ["/1", "/2?x=1", "/3", "/4"]


async def test_data_urls_need_no_setting() -> None:
    pool = _Watched(PoolLimits())
    fetcher = UrlFetcher(enabled=False, hosts=(), max_bytes=2 << 20, pool=pool)
    for size in (100, 2 << 20):
        data = bytes(size)
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        assert await fetcher.fetch(url, FIELD) == data
    assert pool.estimates == [pytest.approx(len(url) * 3e-9)], "only what is long"
    large = f"data:image/png;base64,{base64.b64encode(bytes(100_000)).decode()}"
    assert await _refusal(_fetcher(), large) == "has 100000 bytes; 10000 are allowed"


# ---- what is refused -----------------------------------------------------------------------------


async def test_switched_off() -> None:
    fetcher = UrlFetcher(enabled=False, hosts=("127.0.0.1",), max_bytes=MAX_BYTES, pool=POOL)
    for scheme in ("http", "https", "HTTPS"):
        with pytest.raises(UnsupportedFeatureError) as refused:
            await fetcher.fetch(f"{scheme}://127.0.0.1/a.png", FIELD)
        (violation,) = refused.value.violations
        assert violation.field == FIELD
        assert violation.description == (
            f"is an {scheme.lower()} URL, and this server fetches none (--fetch-urls); send the "
            "bytes or a data URL"
        )


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("file:///etc/passwd", "has the scheme file; http, https and data URLs are accepted"),
        ("ftp://example.com/a.png", "has the scheme ftp; http, https and data URLs are accepted"),
        ("/etc/passwd", "has no scheme; http, https and data URLs are accepted"),
        ("", "has no scheme; http, https and data URLs are accepted"),
        ("http:///a.png", "is a URL without a host"),
        ("http://", "is a URL without a host"),
        ("http://example.com/a b", "isn't a valid URL"),
        ("http://example.com/\r\nX: y", "isn't a valid URL"),
        ("http://exa mple.com/", "isn't a valid URL"),
        ("http://[::1/", "isn't a valid URL"),
        ("http://example.com:x/", "isn't a valid URL"),
        ("http://" + "a" * 70 + ".example/", "isn't a valid URL"),
        ("http://a.example/" + "a" * 9000, "has 9017 characters; 8192 are allowed"),
        ("http://me:pw@8.8.8.8/", "has a user or a password in the URL; take it out"),
        ("http://me@8.8.8.8/", "has a user or a password in the URL; take it out"),
        ("http://8.8.8.8:22/", "names port 22; 80 is allowed with http"),
        ("https://8.8.8.8:80/", "names port 80; 443 is allowed with https"),
        ("http://127.0.0.1/", NOT_ALLOWED),
        ("http://127.1/", NOT_ALLOWED),
        ("http://2130706433/", NOT_ALLOWED),
        ("http://0x7f.0.0.1/", NOT_ALLOWED),
        ("http://0177.0.0.1/", NOT_ALLOWED),
        ("http://localhost/", NOT_ALLOWED),
        ("http://169.254.169.254/latest/meta-data", NOT_ALLOWED),
        ("http://[::1]/", NOT_ALLOWED),
        ("http://[::ffff:127.0.0.1]/", NOT_ALLOWED),
        ("http://[64:ff9b::7f00:1]/", NOT_ALLOWED),
        ("http://[fe80::1%25lo]/", NOT_ALLOWED),
        ("http://①②⑦.0.0.1/", NOT_ALLOWED),
    ],
)
async def test_refused_urls(url: str, sentence: str) -> None:
    assert await _refusal(_fetcher(), url) == sentence


async def test_one_private_address_among_public_ones_is_enough() -> None:
    for address in ("10.0.0.1", "::1", "::ffff:169.254.169.254"):
        fetcher = _fetcher(resolve=_names(mixed_example=["8.8.8.8", address]))
        assert await _refusal(fetcher, "http://mixed.example/") == NOT_ALLOWED


async def test_with_hosts_there_are_no_others() -> None:
    fetcher = _fetcher("Images.Example", "[::1]:8080", resolve=_names())
    for url in ("http://8.8.8.8/", "http://images.example:81/", "http://[::1]/", "http://x/"):
        assert await _refusal(fetcher, url) == NOT_ALLOWED


async def test_a_second_look_up_is_never_made(public: Callable[[_Server], None]) -> None:
    answers = [["127.0.0.2"], ["127.0.0.1"]]

    async def resolve(_host: str) -> Sequence[str]:
        return answers.pop(0)

    async with _serving(_fixed(_with_length()), "127.0.0.2") as server:
        public(server)
        fetcher = _fetcher(resolve=resolve)
        url = server.url(host="rebound.example")
        assert await fetcher.fetch(url, FIELD) == BODY
        assert len(answers) == 1
        assert await _refusal(fetcher, url) == NOT_ALLOWED
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("location", "sentence"),
    [
        ("http://127.0.0.1:PORT/", NOT_ALLOWED),
        ("http://169.254.169.254:PORT/", NOT_ALLOWED),
        ("//[::1]:PORT/", NOT_ALLOWED),
        ("http://inside.example:PORT/", NOT_ALLOWED),
        ("http://127.0.0.2:22/", "names port 22; PORT is allowed with http"),
        ("http://a:b@127.0.0.2:PORT/", "has a user or a password in the URL; take it out"),
        ("file:///etc/passwd", "is redirected to a URL that isn't http or https"),
        ("data:;base64,aGk=", "is redirected to a URL that isn't http or https"),
        ("http://[::1", "isn't a valid URL"),
        ("", "is redirected, but not where to"),
    ],
)
async def test_redirects_are_checked(
    location: str, sentence: str, public: Callable[[_Server], None]
) -> None:
    async def respond(_path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(_redirect(location.replace("PORT", str(server.port))))

    async with _serving(respond, "127.0.0.2") as server:
        public(server)
        names = _names(outside_example=["127.0.0.2"], inside_example=["10.1.2.3"])
        refusal = await _refusal(_fetcher(resolve=names), server.url(host="outside.example"))
    assert refusal == sentence.replace("PORT", str(server.port))
    assert len(server.requests) == 1


async def test_a_loop_of_redirects() -> None:
    async with _serving(_fixed(_redirect("/again", 307))) as server:
        fetcher = _fetcher(f"127.0.0.1:{server.port}")
        assert await _refusal(fetcher, server.url()) == (
            "is redirected more than 3 times, the most allowed"
        )
    assert len(server.requests) == 4


async def test_no_redirect_from_https_to_http() -> None:
    authority = Authority()
    issued = authority.issue("127.0.0.1")
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(theirs, issued.cert, issued.key)
    ours = ssl.create_default_context(cadata=authority.pem.decode())
    async with (
        _serving(_fixed(_with_length())) as plain,
        _serving(_fixed(_redirect(plain.url())), tls=theirs) as server,
    ):
        fetcher = _fetcher(f"127.0.0.1:{server.port}", f"127.0.0.1:{plain.port}", tls=ours)
        refusal = await _refusal(fetcher, server.url(scheme="https"))
    assert refusal == "is redirected from https to http"
    assert plain.requests == []


# ---- size, time and pace -------------------------------------------------------------------------


async def test_too_large_by_its_length() -> None:
    # The body never comes: the header is enough.
    async with _serving(_hanging(OK + b"Content-Length: 10001\r\n\r\n")) as server:
        fetcher = _fetcher(f"127.0.0.1:{server.port}")
        assert await _refusal(fetcher, server.url()) == "has 10001 bytes or more; 10000 are allowed"


def _hanging(head: bytes) -> Respond:
    async def respond(_path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await writer.drain()
        await asyncio.Event().wait()

    return respond


async def test_too_large_without_a_length() -> None:
    sent = 0

    async def respond(_path: str, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(OK + b"\r\n")
        while True:
            writer.write(bytes(4096))
            await writer.drain()
            sent += 4096

    async with _serving(respond) as server:
        refusal = await _refusal(_fetcher(f"127.0.0.1:{server.port}"), server.url())
        assert refusal.endswith(" bytes or more; 10000 are allowed")
        await until(lambda: server.open == 0)
    assert sent < 20 << 20


async def test_a_gzip_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(10 << 20))
    assert len(bomb) < 11_000
    for encoding in (b"gzip", b"br", b"deflate, gzip"):
        response = _with_length(bomb[:5000], b"Content-Encoding: " + encoding)
        async with _serving(_fixed(response)) as server:
            assert await _refusal(_fetcher(f"127.0.0.1:{server.port}"), server.url()) == (
                "is sent compressed (Content-Encoding), which isn't accepted"
            )


async def test_a_server_that_says_nothing() -> None:
    bounds = FetchBounds(timeout_s=0.3)
    for head in (b"", OK, OK + b"Content-Length: 5\r\n\r\nhell"):
        async with _serving(_hanging(head)) as server:
            fetcher = _fetcher(f"127.0.0.1:{server.port}", bounds=bounds)
            assert await _failure(fetcher, server.url()) == "was not delivered within 0.3 s"


async def test_a_server_that_drips() -> None:
    async def respond(_path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"Content-Length: 9000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    bounds = FetchBounds(timeout_s=60, slow_start_s=0.2, min_bytes_per_s=1000)
    async with _serving(respond) as server:
        fetcher = _fetcher(f"127.0.0.1:{server.port}", bounds=bounds)
        assert await _failure(fetcher, server.url()) == (
            "its server sends less than 1000 bytes a second, the least allowed"
        )
        await until(lambda: server.open == 0)


async def test_a_slow_look_up() -> None:
    async def never(_host: str) -> Sequence[str]:
        await asyncio.Event().wait()
        raise AssertionError

    fetcher = _fetcher(bounds=FetchBounds(timeout_s=0.1), resolve=never)
    assert await _failure(fetcher, "http://a.example/") == "was not delivered within 0.1 s"


async def test_only_so_many_at_a_time() -> None:
    go_on = asyncio.Event()

    async def respond(_path: str, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(_with_length())

    async with _serving(respond) as server:
        fetcher = _fetcher(f"127.0.0.1:{server.port}", bounds=FetchBounds(concurrency=2))
        fetches = [asyncio.create_task(fetcher.fetch(server.url(), FIELD)) for _ in range(5)]
        await until(lambda: len(server.requests) == 2)
        fetches[0].cancel()
        await until(lambda: len(server.requests) == 3)
        assert server.open <= 3
        go_on.set()
        results = await asyncio.gather(*fetches, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [BODY] * 4


# ---- failures of servers -------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503, 429, 408])
async def test_statuses_that_may_pass(status: int) -> None:
    async with _serving(_fixed(f"HTTP/1.1 {status} Secret\r\n\r\nsecret".encode())) as server:
        failure = await _failure(_fetcher(f"127.0.0.1:{server.port}"), server.url())
    assert failure == f"its server failed with status {status}"


@pytest.mark.parametrize("status", [204, 206, 304, 401, 403, 404])
async def test_statuses_that_stay(status: int) -> None:
    async with _serving(_fixed(f"HTTP/1.1 {status} Secret\r\n\r\n".encode())) as server:
        refusal = await _refusal(_fetcher(f"127.0.0.1:{server.port}"), server.url())
    assert refusal == f"can't be fetched: its server responds with status {status}"


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2 secret\r\n\r\n",
        OK + b"Content-Length: 100\r\n\r\nshort",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nsecret",
        OK + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_broken_responses(response: bytes) -> None:
    async with _serving(_fixed(response)) as server:
        failure = await _failure(_fetcher(f"127.0.0.1:{server.port}"), server.url())
    assert failure == "its server did not deliver it"


async def test_nobody_listens() -> None:
    async with _serving(_fixed(b"")) as server:
        pass
    failure = await _failure(_fetcher(f"127.0.0.1:{server.port}"), server.url())
    assert failure == "its server did not deliver it"


async def test_a_name_that_is_not_found() -> None:
    async def fail(_host: str) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such secret.internal")

    with pytest.raises(ServingError) as failed:
        await _fetcher(resolve=fail).fetch("http://a.example/", FIELD)
    assert failed.value.message == f"{FIELD}: its server did not deliver it"
