"""Commands that call a server with TLS and API keys, and what they print when that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from millstream_server.cli.flags import KEY_VARIABLE
from millstream_server.cli.main import main
from millstream_testing.fake_processor import FakeServer
from tests.support.processes.command_line import millstream
from tests.support.processes.secured_front import KEY, NAME, SecuredFront, secured_front
from tests.support.wire.certificates import Authority, SecretMount

_COMMANDS = {
    "chat": ("--once", "hi"),
    "complete": ("wheels turn",),
    "models": (),
    "image": ("a cat", "--seed", "7"),
    "video": ("a cat", "--seed", "7", "-o", "cat.mp4"),
    "embed": ("a cat",),
    "rerank": ("a cat", "the cat"),
}
_PRINTED = {
    "chat": "You said: hi\n",
    "complete": " and so on\n",
    "models": "1 prefill, 2 decode",
    "image": "image-7.png (seed 7)\n",
    "video": "cat.mp4 (seed 7)\n",
    "embed": '"embedding": [5.0, 0.0]',
    "rerank": "the cat",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an empty folder, without a key in the environment."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[SecuredFront]:
    async with secured_front(tmp_path) as running:
        yield running


async def run(address: str, command: str, *flags: str) -> int:
    """Run a command beside the server, in its own thread and loop."""
    args = [command, *_COMMANDS[command], "--address", address, *flags]
    return await asyncio.to_thread(main, args)


@pytest.mark.parametrize("command", _COMMANDS)
async def test_each_command_takes_tls_and_a_key(
    front: SecuredFront, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(front.address, command, *front.tls, *front.key) == 0
    assert _PRINTED[command] in capsys.readouterr().out
    assert await run(front.address, command, *front.tls) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: UNAUTHENTICATED (UNAUTHENTICATED): ")
    assert said[1:] == [f"  give the key by --api-key-file, or in {KEY_VARIABLE}"]


async def test_a_key_comes_from_the_environment_unless_a_file_is_named(
    front: SecuredFront,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert await run(front.address, "models", *front.tls) == 0
    (tmp_path / "wrong").write_text("w" * 32)
    assert await run(front.address, "models", *front.tls, "--api-key-file", "wrong") == 1
    assert "the server doesn't know this key" in capsys.readouterr().err


async def test_a_connection_that_tls_refuses_is_explained(
    front: SecuredFront, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(Authority().pem)
    ca = ("--tls-ca-file", str(front.files.ca))
    address = front.address

    async def said(address: str, *flags: str) -> str:
        assert await run(address, "models", *flags) == 1
        return capsys.readouterr().err

    assert await said(address, *ca) == (
        f"error: the certificate of {address} isn't for 127.0.0.1: "
        "give --tls-server-name a name that it holds\n"
    )
    assert await said(address, *ca, "--tls-server-name", "x.example") == (
        f"error: the certificate of {address} isn't for x.example: "
        "give --tls-server-name a name that it holds\n"
    )
    assert await said(address, "--tls-ca-file", str(other), "--tls-server-name", NAME) == (
        f"error: no CA of {other} signed the certificate of {address}: "
        "give --tls-ca-file the file of the CA that did\n"
    )
    assert "no CA of those that gRPC knows signed" in await said(address, "--tls")
    assert await said(address) == (
        f"error: {address} closes connections at once; if it serves TLS, give --tls-ca-file, "
        "or --tls\n"
    )
    async with FakeServer() as plain:
        assert await said(plain.address, "--tls") == (
            f"error: {plain.address} doesn't serve TLS: leave the --tls flags out\n"
        )


async def test_a_certificate_is_shown_to_a_server_that_requires_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = SecretMount(tmp_path / "foreign")
    foreign.put(Authority().issue("client.example"))
    async with secured_front(tmp_path, mutual=True) as front:
        flags = (*front.tls, *front.key)
        for mount, code in ((front.files, 0), (foreign, 1)):
            shown = ("--tls-cert-file", str(mount.cert), "--tls-key-file", str(mount.key))
            assert await run(front.address, "models", *flags, *shown) == code
        assert f"perhaps it doesn't accept the certificate in {foreign.cert}" in (
            capsys.readouterr().err
        )
        assert await run(front.address, "models", *flags) == 1
        assert "if it requires a client certificate, give --tls-cert-file" in (
            capsys.readouterr().err
        )


async def test_an_expired_certificate_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expired = Authority().issue(NAME, days=-1)
    (tmp_path / "ca.pem").write_bytes(expired.ca)
    server = grpc.aio.server()  # ours doesn't start with such a certificate
    credentials = grpc.ssl_server_credentials([(expired.key, expired.cert)])
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    await server.start()
    try:
        assert await run(address, "models", "--tls-ca-file", "ca.pem") == 1
    finally:
        await server.stop(0)
    said = capsys.readouterr().err
    assert said == f"error: the certificate of {address} has expired\n"


async def test_a_process_prints_the_sentence_alone(front: SecuredFront) -> None:
    """gRPC's own lines about a failed handshake would come before it."""
    done = await millstream("models", "--address", front.address, "--tls")
    assert (done.code, done.out) == (1, "")
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("error: no CA of those that gRPC knows signed")
