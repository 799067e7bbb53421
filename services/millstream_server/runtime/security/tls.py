"""TLS of our servers and channels. Changed certificates are read again, without a restart.

The files are looked at before every handshake, and read when their inode or times have changed.
That needs no watcher, and works for a write in place and for the symlink that Kubernetes swaps
under a mounted secret. New files replace the last valid set only when they are valid: every PEM
block parses, the key is the certificate's, the certificate hasn't expired. Otherwise the last valid
set stays in use and one warning names the file. Open connections keep the certificates they were
made with.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.log import get_log

if TYPE_CHECKING:
    from millstream_server.runtime.security.tls_files import Material, Source


H2 = "h2"
HTTP_1_1 = "http/1.1"
# TLS 1.2: those that HTTP/2 allows (RFC 9113, appendix A) with a key of each connection's own. TLS
# 1.3 has its own list, of which OpenSSL offers all.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def server_context(*, chain: bytes, key: bytes, ca: bytes) -> ssl.SSLContext:
    """Make a context of PEM files' bytes; with ``ca`` every client needs a certificate (mTLS).

    A session is never resumed with another context. With TLS 1.3 there are no sessions, so each
    connection's certificate is checked.

    Raises:
        ssl.SSLError: OpenSSL refuses a file, such as an RSA key of 1024 bits.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols([H2, HTTP_1_1])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.num_tickets = 0
    with _as_file(key + b"\n" + chain) as path:
        context.load_cert_chain(
            path, password=""
        )  # never prompts; encrypted keys are refused before
    if ca:
        context.load_verify_locations(cadata=_der(ca))
        context.verify_mode = ssl.CERT_REQUIRED
        # An intermediate CA in the file is trusted without its root, as gRPC does.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _der(pem: bytes) -> bytes:
    # Here, since they take 8 MB: a process without TLS doesn't need them.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415

    # Python takes PEM as ASCII text only; comments between certificates may be anything.
    certificates = x509.load_pem_x509_certificates(pem)
    return b"".join(each.public_bytes(Encoding.DER) for each in certificates)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Give the path of a file with ``content``: Python loads keys from files only.

    The files of the settings may have changed since they were checked. In memory where the system
    can, so that no second copy of the key lies on a disk.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("millstream-tls")
        try:
            os.write(fd, content)
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
        return
    with tempfile.NamedTemporaryFile() as file:  # mode 0600
        file.write(content)
        file.flush()
        yield file.name


log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A server's certificate, and the CAs of its clients."""

    cert: Path
    """PEM chain, the server's own certificate first."""
    key: Path
    """PEM private key of that certificate, not encrypted."""
    client_ca: Path | None = None
    """PEM CAs; if set, every client needs a certificate that one of them signed (mTLS)."""


class ServerTls:
    """A server's certificate and its clients' CAs; changed files are read again."""

    def __init__(self, files: TlsFiles, ca_flag: str = "--tls-client-ca-file") -> None:
        """Read and check the files; ``ca_flag`` is the setting of the clients' CAs, for errors.

        Raises:
            SettingsError: a file is missing or invalid; the text names it and the setting.
        """
        flags = ("--tls-cert-file", "--tls-key-file", ca_flag)
        self._source = _source(flags, files.cert, files.key, files.client_ca)
        self._files = files
        self._context: ssl.SSLContext | None = None
        self._context_of: Material | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context for the next handshake, of the last valid files; don't change it.

        For one event loop. For servers of grpc.aio there is `credentials`.

        Raises:
            SettingsError: OpenSSL refuses the files at the first call. Later it is a warning and
                the last context stays in use.
        """
        current = self._source.current()
        if self._context is None or current is not self._context_of:
            self._context_of = current
            self._context = self._context_for(current)
        return self._context

    def _context_for(self, material: Material) -> ssl.SSLContext:
        try:
            return server_context(chain=material.chain, key=material.key, ca=material.ca)
        except ssl.SSLError as error:
            sentence = f"--tls-cert-file: OpenSSL refuses {self._files.cert}: {error}"
            if self._context is None:
                raise SettingsError(sentence) from error
            log.warning("new certificates unusable; the old ones stay", reason=sentence)
            return self._context

    def credentials(self) -> grpc.ServerCredentials:
        """Make credentials for one `add_secure_port`; each port needs its own."""
        shown = self._source.current()

        # gRPC calls this before each handshake, in its own thread.
        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            current = self._source.current()
            if current is shown:
                return None
            shown = current
            return _configuration(current)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(shown),
            fetch,  # type: ignore[arg-type] # the stubs forget None, "no change"
            require_client_authentication=bool(shown.ca),
        )

    def expiry_timestamp_s(self) -> float:
        """Return when the certificate in use expires, in Unix seconds; for a metric."""
        return self._source.current().expires_at_s


class ClientTls:
    """A client's certificate and the CAs it trusts.

    gRPC's client credentials don't follow their files, so the owner of a channel calls `changed`
    before it reconnects, and opens a new channel if True.
    """

    def __init__(
        self, folder: Path, *, server_name: str = "", flag: str = "--worker-tls-dir"
    ) -> None:
        """Trust ``ca.crt`` of ``folder``; show ``tls.crt`` with ``tls.key``, if they are there.

        ``server_name`` replaces the address's host as the expected name in the server's
        certificate, for addresses that are IPs. ``flag`` is the folder's setting, for errors.

        Raises:
            SettingsError: a file is missing or invalid; the text names it and the setting.
        """
        self.server_name = server_name
        cert, key = folder / "tls.crt", folder / "tls.key"
        shows = cert.exists() or key.exists()
        shown = (cert if shows else None, key if shows else None, folder / "ca.crt")
        self._source = _source((flag, flag, flag), *shown)
        self._shown = self._source.current()

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files and make credentials of them."""
        self._shown = self._source.current()
        return grpc.ssl_channel_credentials(
            self._shown.ca, self._shown.key or None, self._shown.chain or None
        )

    def changed(self) -> bool:
        """Return whether the files have changed since the last `credentials`."""
        return self._source.current() is not self._shown

    def expiry_timestamp_s(self) -> float:
        """Return when the client's certificate expires, in Unix seconds; infinite without one."""
        return self._source.current().expires_at_s


def _source(
    flags: tuple[str, str, str], cert: Path | None, key: Path | None, ca: Path | None
) -> Source:
    """Read a certificate, its key and CAs; ``flags`` are their settings."""
    # Here, since it takes 8 MB: a process without TLS doesn't need it.
    from millstream_server.runtime.security.tls_files import Paths, Source  # noqa: PLC0415

    return Source(Paths(*flags, cert, key, ca))


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    # A new one each time: gRPC frees it.
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.chain)], material.ca or None
    )
