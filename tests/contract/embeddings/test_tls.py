"""A worker fetches from an encode worker over TLS, with a certificate of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream_server.encode.fetching.fetch import EmbeddingFetcher, fetch_tls
from millstream_server.encode.transfer.settings import EmbeddingFetchSettings
from millstream_server.runtime.errors import EmbeddingTransferError
from millstream_server.runtime.security.tls import ServerTls, TlsFiles
from millstream_server.runtime.settings import SettingsError
from tests.support.media.embeddings import TICKETS, Sending, pattern, sending
from tests.support.wire.certificates import Authority, SecretMount


@pytest.fixture
def server(tmp_path: Path) -> SecretMount:
    return mount(tmp_path / "server", Authority())


def mount(folder: Path, authority: Authority) -> SecretMount:
    made = SecretMount(folder)
    made.put(authority.issue("encode.example"))
    return made


@contextlib.asynccontextmanager
async def secured(server: SecretMount) -> AsyncIterator[Sending]:
    tls = ServerTls(TlsFiles(server.cert, server.key, client_ca=server.ca))
    async with sending(tls=tls) as sender:
        yield sender


def settings(files: SecretMount, *, shows: bool = True) -> EmbeddingFetchSettings:
    return EmbeddingFetchSettings(
        encode_tls_dir=files.root if shows else files.of_ca(), encode_tls_name="encode.example"
    )


async def test_with_the_right_certificates(server: SecretMount) -> None:
    fetcher = EmbeddingFetcher(TICKETS, tls=fetch_tls(settings(server)))
    async with secured(server) as sender:
        tensor = await fetcher.fetch(sender.ticket(3 << 20))
        assert tensor.data == pattern(3 << 20)
        await fetcher.close()


async def test_changed_certificates_make_a_new_channel(server: SecretMount) -> None:
    fetcher = EmbeddingFetcher(TICKETS, tls=fetch_tls(settings(server)))
    async with secured(server) as sender:
        await fetcher.fetch(sender.ticket(64))
        server.put(Authority().issue("encode.example"))  # both ends' from now on
        assert (await fetcher.fetch(sender.ticket(128))).data == pattern(128)
        assert len(fetcher._peers) == 1
        await fetcher.close()


@pytest.mark.parametrize("who", ["another authority", "no certificate", "no tls"])
async def test_others_get_nothing(server: SecretMount, tmp_path: Path, who: str) -> None:
    tls = {
        "another authority": lambda: fetch_tls(settings(mount(tmp_path / "x", Authority()))),
        "no certificate": lambda: fetch_tls(settings(server, shows=False)),
        "no tls": lambda: fetch_tls(EmbeddingFetchSettings()),
    }[who]()
    fetcher = EmbeddingFetcher(TICKETS, tls=tls, timeout_s=3)
    async with secured(server) as sender:
        with pytest.raises(EmbeddingTransferError):
            await fetcher.fetch(sender.ticket(64))
        await fetcher.close()


def test_a_folder_without_a_file_is_refused(server: SecretMount) -> None:
    server.key.unlink()
    with pytest.raises(SettingsError, match=r"--encode-tls-dir: can't read .*tls\.key"):
        fetch_tls(settings(server))
    with pytest.raises(SettingsError, match=r"--encode-tls-dir: can't read .*ca\.crt"):
        fetch_tls(EmbeddingFetchSettings(encode_tls_dir=Path("missing")))
