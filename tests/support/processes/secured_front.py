"""A server with TLS and API keys in front of fakes: every RPC that commands call, no model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from millstream_server.runtime.lifecycle.server import ServerOptions
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_server.runtime.security.tls import ServerTls, TlsFiles
from millstream_server.runtime.transport.options import TransportOptions
from tests.support.processor.fake_generators import FakeDiffusion, FakeEmbedding, generators
from tests.support.wire.certificates import Authority, SecretMount

KEY = "k" * 32
NAME = "processor.example"


@dataclass(frozen=True)
class SecuredFront:
    """Where it is, and what a client needs."""

    address: str
    files: SecretMount
    """Its certificate is for NAME only, not for the address."""
    key_file: Path

    @property
    def tls(self) -> tuple[str, ...]:
        """The flags with which a command trusts it."""
        return ("--tls-ca-file", str(self.files.ca), "--tls-server-name", NAME)

    @property
    def key(self) -> tuple[str, ...]:
        return ("--api-key-file", str(self.key_file))


@contextlib.asynccontextmanager
async def secured_front(folder: Path, *, mutual: bool = False) -> AsyncIterator[SecuredFront]:
    """Serve; with ``mutual``, clients have to show a certificate of the same CA."""
    files = SecretMount(folder / "tls")
    files.put(Authority().issue(NAME))
    key_file = folder / "key"
    key_file.write_text(f"{KEY}\n")
    options = ServerOptions(
        max_receive_bytes=4 << 20,
        clients=TransportOptions(max_receive_bytes=4 << 20),
        tls=ServerTls(TlsFiles(files.cert, files.key, files.ca if mutual else None)),
        auth=AuthPolicy(keys=ApiKeys(inline=f"alice:{KEY}")),
    )
    async with generators(FakeDiffusion(), FakeEmbedding(), options) as address:
        yield SecuredFront(address, files, key_file)
