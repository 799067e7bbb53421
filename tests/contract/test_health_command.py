"""`millstream health`: what a probe sees of a server in every state."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from millstream_server.cli.entry import run_plain
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.security.tls import ServerTls, TlsFiles
from millstream_testing.in_process import worker
from tests.support.clients.clients import tell_serving
from tests.support.processes.ports import free_port
from tests.support.wire.certificates import Authority, SecretMount

DECODE = "millstream.v1.DecodeService"


async def health(*args: str) -> int:
    """Run the command; gRPC's sync client needs a thread beside the server's loop."""
    return await asyncio.to_thread(run_plain, ["health", *args])


async def test_a_server_that_loads_is_not_healthy_but_alive(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with worker(loaded=False) as one:
        assert await health(one.address) == 1
        assert await health(one.address, "--service", DECODE) == 1
        assert await health(one.address, "--service", "liveness") == 0
        await one.load()
        assert await health(one.address) == 0
        assert await health(one.address, "--service", DECODE) == 0
        assert await health(one.address, "--service", "nobody") == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{one.address}: NOT_SERVING",
        f"{one.address} {DECODE}: NOT_SERVING",
        f"{one.address} liveness: SERVING",
        f"{one.address}: SERVING",
        f"{one.address} {DECODE}: SERVING",
        f"{one.address} nobody: the server has no service of this name",
    ]


async def test_a_server_that_is_not_there_or_does_not_reply_is_not_healthy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    assert await health(nobody) == 1
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert await health(address, "--timeout-s", "0.2") == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{nobody}: can't be reached: ")
    assert second == f"{address}: no reply within 0.2 s"


async def test_tls_is_spoken_with_the_files_that_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, files = Authority(), SecretMount(tmp_path / "tls")
    files.put(authority.issue("server.example"))
    tls = ServerTls(TlsFiles(files.cert, files.key, files.ca))
    server = Server((DECODE,), ServerOptions(max_receive_bytes=1 << 20, tls=tls))
    address = f"127.0.0.1:{await server.listen('127.0.0.1:0')}"
    await tell_serving(server, serving=True)
    shown = (
        *("--tls-ca-file", str(files.ca), "--tls-server-name", "server.example"),
        *("--tls-cert-file", str(files.cert), "--tls-key-file", str(files.key)),
    )
    try:
        assert await health(address, *shown) == 0
        assert await health(address, *shown[:4], "--timeout-s", "2") == 1
        assert await health(address, *shown[:2], *shown[4:], "--timeout-s", "2") == 1
        assert await health(address, "--timeout-s", "2") == 1
    finally:
        await server.stop(0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{address}: SERVING"
    assert len(lines) == 4, "one line each"
    assert "if it requires a client certificate, give" in lines[1]
    assert "can't be reached: the certificate of" in lines[2]
    assert "if it serves TLS, give --tls-ca-file" in lines[3]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["server"], "'server' is not HOST:PORT"),
        ([":1"], "':1' is not HOST:PORT"),
        (["a:65536"], "'a:65536' is not HOST:PORT"),
        (
            ["a:1", "--tls-ca-file", "/no/such"],
            "--tls-ca-file: /no/such can't be read: No such file",
        ),
        (["a:1", "--tls-key-file", "/dev/null"], "--tls-cert-file is missing"),
    ],
)
def test_wrong_usage_has_an_exit_code_of_its_own(
    args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plain(["health", *args]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--timeout-s", "0"], ["--no-such-flag"], ["a:1", "b:2"]])
def test_a_flag_that_is_none_is_wrong_usage(args: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_plain(["health", *args])
    assert ended.value.code == 2


_SCRIPT = """
import json, sys
from millstream_server.cli.entry import main
sys.argv = ["millstream", "health", sys.argv[1]]
code = main()
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_it_imports_little_since_it_runs_every_few_seconds() -> None:
    address = f"127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, address], capture_output=True, text=True, check=True
    )
    code, loaded = json.loads(done.stdout.splitlines()[-1])
    assert code == 1
    heavy = {"rich", "prompt_toolkit", "packaging", "transformers", "tokenizers", "numpy"}
    heavy |= {"opentelemetry", "aiohttp", "millstream_client", "cryptography", "jinja2", "torch"}
    assert not heavy & set(loaded)
