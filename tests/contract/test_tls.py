"""TLS over real sockets: who gets a connection, and how certificates change under way."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from google.protobuf.wrappers_pb2 import StringValue

from millstream_server.runtime.security.tls import ClientTls, ServerTls, TlsFiles
from millstream_server.runtime.settings import SettingsError
from tests.support.telemetry.logged import fields_of
from tests.support.wire.certificates import Authority, Issued, SecretMount
from tests.support.wire.echo_service import SERVICE, Echoing, answer, call, echoing
from tests.support.wire.failures import refusal

pytestmark = pytest.mark.both_transports

_NAME = "127.0.0.1"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def other_ca() -> Authority:
    return Authority()


@pytest.fixture
def server_mount(tmp_path: Path, authority: Authority) -> SecretMount:
    return _mount(tmp_path / "server", authority.issue(_NAME))


@pytest.fixture
def client_mount(tmp_path: Path, authority: Authority) -> SecretMount:
    return _mount(tmp_path / "client", authority.issue("processor.example"))


def _mount(root: Path, issued: Issued) -> SecretMount:
    mount = SecretMount(root)
    mount.put(issued)
    return mount


def _server(mount: SecretMount, *, mutual: bool = False) -> ServerTls:
    return ServerTls(TlsFiles(mount.cert, mount.key, mount.ca if mutual else None))


def _client(mount: SecretMount, *, shows: bool = True) -> ClientTls:
    return ClientTls(mount.root if shows else mount.of_ca())


async def _shown(served: Echoing) -> int:
    """Make a handshake; answer the serial of the certificate the server shows."""

    def handshake() -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((_NAME, served.port)) as plain,
            context.wrap_socket(plain) as secured,
        ):
            der = secured.getpeercert(binary_form=True)
            assert der is not None
            return der

    return x509.load_der_x509_certificate(await asyncio.to_thread(handshake)).serial_number


# ---- who gets a connection -----------------------------------------------------------------------


@pytest.mark.parametrize("mutual", [False, True])
async def test_a_client_that_trusts_the_server_is_served(
    server_mount: SecretMount,
    client_mount: SecretMount,
    mutual: bool,  # noqa: FBT001
) -> None:
    async with (
        echoing(tls=_server(server_mount, mutual=mutual)) as served,
        served.channel(_client(client_mount, shows=mutual)) as channel,
    ):
        assert await answer(call(channel, "Unary")) == "hi anonymous anonymous"


async def test_a_client_without_tls_gets_nothing(server_mount: SecretMount) -> None:
    async with echoing(tls=_server(server_mount)) as served, served.channel() as channel:
        failed = await refusal(call(channel, "Unary"))
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert served.echo.reached == 0


async def test_a_server_of_another_ca_is_not_trusted(
    tmp_path: Path, client_mount: SecretMount, other_ca: Authority
) -> None:
    false_server = _mount(tmp_path / "false", other_ca.issue(_NAME))
    async with (
        echoing(tls=_server(false_server)) as served,
        served.channel(_client(client_mount, shows=False)) as channel,
    ):
        failed = await refusal(call(channel, "Unary"))
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert served.echo.reached == 0


async def test_a_server_is_known_by_the_name_asked_for(
    tmp_path: Path, authority: Authority, client_mount: SecretMount
) -> None:
    mount = _mount(tmp_path / "named", authority.issue("worker.example"))
    async with echoing(tls=_server(mount)) as served:
        async with served.channel(_client(client_mount)) as channel:
            failed = await refusal(call(channel, "Unary"))
            assert failed.code is grpc.StatusCode.UNAVAILABLE
        named = ClientTls(client_mount.of_ca(), server_name="worker.example")
        async with served.channel(named) as channel:
            assert await answer(call(channel, "Unary")) == "hi anonymous anonymous"


@pytest.mark.parametrize("brings", ["nothing", "another CA's", "an expired one"])
async def test_mtls_takes_no_client_without_a_good_certificate(
    server_mount: SecretMount, authority: Authority, other_ca: Authority, brings: str
) -> None:
    issued = {
        "nothing": None,
        "another CA's": other_ca.issue("processor.example"),
        "an expired one": authority.issue("processor.example", days=-1),
    }[brings]
    own = (issued.key, issued.cert) if issued else ()
    credentials = grpc.ssl_channel_credentials(authority.pem, *own)
    async with (
        echoing(tls=_server(server_mount, mutual=True)) as served,
        grpc.aio.secure_channel(served.address, credentials) as channel,
    ):
        failed = await refusal(call(channel, "Unary"))
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert served.echo.reached == 0


# ---- rotation ------------------------------------------------------------------------------------


async def test_a_new_certificate_is_shown_and_an_old_stream_goes_on(
    server_mount: SecretMount, client_mount: SecretMount, authority: Authority
) -> None:
    tls = _server(server_mount)
    old_end = tls.expiry_timestamp_s()
    new = authority.issue(_NAME, days=60)
    async with echoing(tls=tls) as served, served.channel(_client(client_mount)) as channel:
        open_call: Any = channel.stream_stream(f"/{SERVICE}/Bidi")()
        before = await _echo(open_call, "one")
        first = await _shown(served)
        server_mount.put(new)
        assert await _shown(served) == new.serial != first
        assert before == "one anonymous anonymous"
        assert await _echo(open_call, "two") == "two anonymous anonymous"
        open_call.cancel()
        async with served.channel(_client(client_mount)) as fresh:
            assert await answer(call(fresh, "Unary")) == "hi anonymous anonymous"
    assert tls.expiry_timestamp_s() == new.ends.timestamp() > old_end


async def _echo(open_call: Any, text: str) -> str:
    await open_call.write(StringValue(value=text).SerializeToString())
    return StringValue.FromString(await open_call.read()).value


async def test_every_port_follows_the_files(
    server_mount: SecretMount, authority: Authority
) -> None:
    tls = _server(server_mount)
    async with echoing(tls=tls) as one, echoing(tls=tls) as other:
        new = authority.issue(_NAME)
        server_mount.put(new)
        assert await _shown(one) == new.serial
        assert await _shown(other) == new.serial


async def test_clients_of_a_retired_ca_get_no_new_connection(
    server_mount: SecretMount,
    client_mount: SecretMount,
    authority: Authority,
    other_ca: Authority,
) -> None:
    old_client = _client(client_mount)
    async with (
        echoing(tls=_server(server_mount, mutual=True)) as served,
        served.channel(old_client) as channel,
    ):
        assert await answer(call(channel, "Unary"))
        server_mount.put(authority.issue(_NAME), ca=other_ca.pem)
        assert await answer(call(channel, "Unary")), "the connection it has lives on"
        async with served.channel(old_client) as again:
            failed = await refusal(call(again, "Unary"))
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        client_mount.put(other_ca.issue("processor.example"), ca=authority.pem)
        assert old_client.changed()
        async with served.channel(old_client) as renewed:
            assert await answer(call(renewed, "Unary"))
        assert not old_client.changed()


def _half_written(good: Issued, new: Issued) -> dict[str, tuple[str, dict[str, bytes]]]:
    """What may be found in the files on the way from one set to another, and whom that concerns."""
    whole = {"tls.crt": new.cert, "tls.key": new.key, "ca.crt": good.ca}
    return {
        "half a key": ("--tls-key-file", {**whole, "tls.key": new.key[: len(new.key) // 2]}),
        "the old key": ("--tls-key-file", {**whole, "tls.key": good.key}),
        "no key yet": ("--tls-key-file", {"tls.crt": new.cert, "ca.crt": good.ca}),
        "empty files": ("--tls-client-ca-file", dict.fromkeys(whole, b"")),
        "half a bundle": ("--tls-client-ca-file", {**whole, "ca.crt": good.ca + good.ca[:200]}),
        "half a chain": ("--tls-cert-file", {**whole, "tls.crt": new.cert + good.ca[:200]}),
    }


@pytest.mark.parametrize(
    "state",
    ["half a key", "the old key", "no key yet", "empty files", "half a bundle", "half a chain"],
)
async def test_a_broken_set_leaves_the_good_one_and_one_warning(
    tmp_path: Path, authority: Authority, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, new = authority.issue(_NAME), authority.issue(_NAME)
    mount = _mount(tmp_path, good)
    client = ClientTls(mount.root)
    async with echoing(tls=_server(mount, mutual=True)) as served:
        named, files = _half_written(good, new)[state]
        mount.put_files(files)
        caplog.clear()
        assert [await _shown(served) for _ in range(3)] == [good.serial] * 3
        warnings = [str(fields_of(r)) for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert named in warnings[0]
        assert str(mount.root) in warnings[0]
        async with served.channel(client) as channel:
            assert await answer(call(channel, "Unary"))
        mount.put(new)
        assert await _shown(served) == new.serial


async def test_a_write_in_place_counts_too_even_with_the_old_time_stamps(
    tmp_path: Path, authority: Authority
) -> None:
    old, new = authority.issue(_NAME), authority.issue(_NAME)
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    cert.write_bytes(old.cert)
    key.write_bytes(old.key)
    async with echoing(tls=ServerTls(TlsFiles(cert, key))) as served:
        stamp = cert.stat()
        cert.write_bytes(new.cert)
        assert await _shown(served) == old.serial, "the key hasn't come yet"
        key.write_bytes(new.key)
        for path in (cert, key):
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        assert await _shown(served) == new.serial


def test_a_client_keeps_what_is_good_and_tells_what_changed(
    client_mount: SecretMount, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = _client(client_mount)
    tls.credentials()
    assert not tls.changed()
    broken = authority.issue("processor.example")
    client_mount.put_files({"tls.crt": broken.cert, "tls.key": b"", "ca.crt": broken.ca})
    assert not tls.changed()
    assert any("--worker-tls-dir" in str(fields_of(r)) for r in caplog.records)
    client_mount.put(authority.issue("processor.example", days=5))
    assert tls.changed()
    assert tls.changed(), "until it is used"
    tls.credentials()
    assert not tls.changed()


def test_days_left_are_told_and_soon_is_a_warning(
    server_mount: SecretMount, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for days, level in ((90, "INFO"), (3, "WARNING")):
        caplog.clear()
        issued = authority.issue(_NAME, days=days + 0.5)
        server_mount.put(issued)
        assert _server(server_mount).expiry_timestamp_s() == issued.ends.timestamp()
        (record,) = caplog.records
        assert record.levelname == level
        assert fields_of(record)["days_left"] == days


# ---- settings ------------------------------------------------------------------------------------


def _refused(make: Callable[[], object]) -> str:
    with pytest.raises(SettingsError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(
    ("flag", "files"),
    [
        ("--tls-cert-file: can't read", {"tls.crt": None}),
        ("--tls-key-file: can't read", {"tls.key": None}),
        ("--tls-client-ca-file: can't read", {"ca.crt": None}),
        ("--tls-cert-file", {"tls.crt": b"no PEM"}),
        ("--tls-key-file", {"tls.key": b"no PEM"}),
        ("--tls-client-ca-file", {"ca.crt": b"no PEM"}),
        ("--tls-client-ca-file", {"ca.crt": b""}),
    ],
)
def test_a_bad_file_stops_the_start_and_is_named(
    server_mount: SecretMount, authority: Authority, flag: str, files: dict[str, bytes | None]
) -> None:
    good = authority.issue(_NAME)
    contents = {"tls.crt": good.cert, "tls.key": good.key, "ca.crt": good.ca, **files}
    server_mount.put_files({k: v for k, v in contents.items() if v is not None})
    sentence = _refused(lambda: _server(server_mount, mutual=True))
    assert sentence.startswith(flag)
    assert str(server_mount.root / next(iter(files))) in sentence


def test_a_foreign_key_an_encrypted_key_and_an_old_certificate_stop_the_start(
    server_mount: SecretMount, authority: Authority
) -> None:
    good, other = authority.issue(_NAME), authority.issue(_NAME)
    server_mount.put(Issued(good.cert, other.key, good.ca))
    assert "is not that of the certificate" in _refused(lambda: _server(server_mount))
    secret = load_pem_private_key(good.key, password=None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")
    )
    server_mount.put(Issued(good.cert, secret, good.ca))
    assert "an encrypted one is none" in _refused(lambda: _server(server_mount))
    server_mount.put(authority.issue(_NAME, days=-1))
    sentence = _refused(lambda: _server(server_mount))
    assert sentence.startswith("--tls-cert-file: the certificate in ")
    assert "expired on" in sentence


def test_a_clients_certificate_needs_its_key(
    client_mount: SecretMount, authority: Authority
) -> None:
    for name in ("tls.key", "tls.crt"):
        client_mount.put(authority.issue("processor.example"))
        (client_mount.root / name).unlink()
        sentence = _refused(lambda: ClientTls(client_mount.root))
        assert sentence.startswith(f"--worker-tls-dir: can't read {client_mount.root / name}")
    folder = client_mount.root / "none"
    sentence = _refused(lambda: ClientTls(folder))
    assert sentence.startswith(f"--worker-tls-dir: can't read {folder / 'ca.crt'}")
