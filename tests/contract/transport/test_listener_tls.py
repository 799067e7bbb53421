"""TLS of the HTTP/2 transport's sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import ssl
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from cryptography import x509

from millstream_server.runtime.rpc.call import key_of_address
from millstream_server.runtime.rpc.ledger import Place
from millstream_server.runtime.security import tls_files as tls_module
from millstream_server.runtime.security.tls import ServerTls, TlsFiles
from millstream_server.runtime.transport.listener import Listener
from millstream_testing.waiting import until
from tests.support.wire.certificates import Authority, SecretMount
from tests.support.wire.http_service import http_service
from tests.support.wire.listening import (
    OPTIONS,
    PREFACE,
    closes,
    exchange,
    get,
    listening,
    parsed,
    trusting,
)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def mount(tmp_path: Path, authority: Authority) -> SecretMount:
    made = SecretMount(tmp_path / "server")
    made.put(authority.issue("127.0.0.1"))
    return made


async def test_http2_over_tls_is_chosen_in_the_handshake(
    mount: SecretMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream_server.runtime.transport.http1._LINGER_S", 0.05)
    tls = ServerTls(TlsFiles(mount.cert, mount.key))
    async with listening(tls=tls) as server:
        reader, writer = await server.connect(trusting(mount, "http/1.1", "h2"))
        writer.write(PREFACE)
        assert await reader.readexactly(len(PREFACE)) == PREFACE
        writer.close()
        for offers in ((), ("http/1.1",), ("other",)):
            context = trusting(mount, *offers)
            answered = parsed(await exchange(await server.connect(context), get("/livez")))
            assert answered[0] == 200
            answered = parsed(await exchange(await server.connect(context), PREFACE))
            assert answered[0] == 400
            assert answered[2].startswith("HTTP/2 over TLS needs the ALPN protocol h2")
    assert len(server.made) == 1


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
async def test_a_client_of_either_version_gets_events(mount: SecretMount, version: str) -> None:
    tls = ServerTls(TlsFiles(mount.cert, mount.key))
    verify = ssl.create_default_context(cafile=str(mount.ca))
    async with (
        http_service(tls=tls) as service,
        httpx.AsyncClient(http2=version == "HTTP/2", verify=verify, trust_env=False) as client,
    ):
        for _ in range(2):
            service.pieces = [b"data: 1\n\n", b"data: 2\n\n"]
            response = await client.post(f"https://127.0.0.1:{service.port}/events", content=b"{}")
            assert (response.status_code, response.http_version) == (200, version)
            assert response.content == b"data: 1\n\ndata: 2\n\n"
        assert len(service.server.connections) == 1


@pytest.mark.parametrize("most", [ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2])
async def test_tls_is_of_version_1_2_at_least(mount: SecretMount, most: ssl.TLSVersion) -> None:
    context = trusting(mount, "h2")
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = most
    async with listening(tls=ServerTls(TlsFiles(mount.cert, mount.key))) as server:
        if most is ssl.TLSVersion.TLSv1_1:
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await server.connect(context)
            return
        _, writer = await server.connect(context)
        secured = writer.get_extra_info("ssl_object")
        assert secured.version() == "TLSv1.2"
        assert secured.cipher()[0].startswith("ECDHE-")
        writer.close()


@pytest.mark.parametrize("shows", ["nothing", "another CA's", "its own CA's"])
async def test_with_client_cas_a_probe_needs_a_certificate_too(
    mount: SecretMount, authority: Authority, tmp_path: Path, shows: str
) -> None:
    context = trusting(mount)
    if shows != "nothing":
        ca = authority if shows.startswith("its") else Authority()
        client = SecretMount(tmp_path / "client")
        client.put(ca.issue("probe.example"))
        context.load_cert_chain(client.cert, client.key)
    tls = ServerTls(TlsFiles(mount.cert, mount.key, mount.ca))
    async with listening(tls=tls) as server:
        try:
            answer = await exchange(await server.connect(context), get("/livez"))
        except (ssl.SSLError, ConnectionResetError, BrokenPipeError):
            answer = b""
    assert bool(answer) is (shows == "its own CA's")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_handshake_that_doesnt_end_is_cut_and_leaves_nothing(
    mount: SecretMount, run: Callable[[Any], None]
) -> None:
    async def silent() -> None:
        tls = ServerTls(TlsFiles(mount.cert, mount.key))
        async with listening(replace(OPTIONS, handshake_s=0.1), tls) as server:
            with contextlib.suppress(ConnectionResetError):
                assert await exchange(await server.connect(), b"\x16\x03\x01") == b""
        gc.collect()  # what other tests left behind
        before = open_files()  # only now: uvloop keeps one for itself
        async with listening(OPTIONS, tls) as server:
            connections = [await server.connect() for _ in range(3)]
            server.listener.close(at_once=True)
            await asyncio.gather(*map(closes, connections))
            await asyncio.wait_for(server.listener.closed(), 5)
        await until(lambda: open_files() <= before)

    run(silent())


async def test_files_are_read_only_after_a_change(
    mount: SecretMount, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_module, "_SETTLED_NS", -1)
    read = tls_module._read
    reads = []

    def counting(*args: Any, **more: Any) -> Any:
        reads.append(1)
        return read(*args, **more)

    monkeypatch.setattr(tls_module, "_read", counting)
    tls = ServerTls(TlsFiles(mount.cert, mount.key))
    first = tls.context()
    assert tls.context() is first
    assert len(reads) == 1
    mount.put(authority.issue("127.0.0.1"))
    assert tls.context() is not first
    assert tls.context() is tls.context()
    assert len(reads) == 2


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_silent_handshakes_make_room_for_others(
    mount: SecretMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream_server.runtime.transport.listener._PATIENCE_S", 0.05)
    tls = ServerTls(TlsFiles(mount.cert, mount.key))
    async with listening(replace(OPTIONS, max_handshakes=2), tls) as server:
        silent = [await server.connect() for _ in range(5)]
        context = trusting(mount)
        assert parsed(await exchange(await server.connect(context), get("/livez")))[0] == 200
        await asyncio.gather(*map(closes, silent[:3]))
        for _, writer in silent[3:]:
            writer.close()


async def test_certificates_change_under_traffic_without_a_failed_handshake(
    mount: SecretMount, authority: Authority
) -> None:
    context = trusting(mount)
    issued = [authority.issue("127.0.0.1") for _ in range(8)]
    async with listening(tls=ServerTls(TlsFiles(mount.cert, mount.key))) as server:
        swapping = asyncio.Event()

        async def probe() -> None:
            while not swapping.is_set():
                answer = await exchange(await server.connect(context), get("/livez"))
                assert parsed(answer)[0] == 200

        probing = [asyncio.ensure_future(probe()) for _ in range(4)]
        for each in issued:
            mount.put(each)
            for _ in range(3):
                await exchange(await server.connect(context), get("/livez"))
        swapping.set()
        await asyncio.gather(*probing)
        _, writer = await server.connect(context)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert x509.load_der_x509_certificate(shown).serial_number == issued[-1].serial
        writer.close()


async def test_handshakes_begin_one_in_a_turn_of_the_loop_of_each_caller_in_turn(
    mount: SecretMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand of one caller would hold up all others: each takes about a millisecond."""
    begun = list[str]()

    def begin(_: Listener, accepted: socket.socket, place: Place, *_rest: object) -> None:
        begun.append(str(place.caller_key))
        accepted.close()
        place.free()

    monkeypatch.setattr(Listener, "_begin", begin)
    tls = ServerTls(TlsFiles(mount.cert, mount.key))
    async with listening(tls=tls) as server:
        pairs = [socket.socketpair() for _ in range(4)]
        for (ours, _), caller in zip(pairs, (1, 1, 1, 2), strict=True):
            server.listener._take(tls, ours, (f"10.0.0.{caller}", 1))
        counts = []
        while len(begun) < len(pairs):
            await asyncio.sleep(0)
            counts.append(len(begun))
        for _, theirs in pairs:
            theirs.close()
    assert max(b - a for a, b in itertools.pairwise([0, *counts])) == 1
    many, one = (key_of_address(f"ipv4:10.0.0.{n}:1") for n in (1, 2))
    assert begun == [many, one, many, many]
