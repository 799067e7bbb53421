"""TLS of our servers and channels. Changed certificates are read again, without a restart.

The files are read at every handshake: a few KB, cheap beside the handshake itself. That needs no
watcher, and works for a write in place and for the symlink that Kubernetes swaps under a mounted
secret. New files replace the last valid set only when they are valid: every PEM block parses, the
key is the certificate's, the certificate hasn't expired. Otherwise the last valid set stays in use
and one warning names the file. Open connections keep the certificates they were made with.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_DAY_S = 86_400
_SOON_DAYS = 14
"""A certificate that expires sooner is logged as a warning: rotation may have failed."""


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
        self._source = _Source(_Paths("--tls-", ca_flag, files.cert, files.key, files.client_ca))

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
        self,
        ca: Path,
        cert: Path | None = None,
        key: Path | None = None,
        *,
        server_name: str = "",
        prefix: str = "--worker-tls-",
    ) -> None:
        """Trust ``ca``; send ``cert`` to servers that request a certificate.

        ``server_name`` replaces the address's host as the expected name in the server's
        certificate, for addresses that are IPs. ``prefix`` is that of the settings, for errors.

        Raises:
            SettingsError: a file is missing or invalid; the text names it and the setting.
        """
        if (cert is None) != (key is None):
            raise SettingsError(
                f"{prefix}cert-file and {prefix}key-file belong together: set both or none"
            )
        self.server_name = server_name
        self._source = _Source(_Paths(prefix, f"{prefix}ca-file", cert, key, ca))
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


@dataclass(frozen=True, slots=True)
class _Paths:
    """The files of a client or a server, and their settings' names."""

    prefix: str
    ca_flag: str
    cert: Path | None
    key: Path | None
    ca: Path | None


@dataclass(frozen=True, slots=True)
class _Material:
    """The bytes of the files; empty where nothing is configured."""

    chain: bytes
    key: bytes
    ca: bytes
    expires_at_s: float = math.inf

    def same_bytes(self, other: _Material) -> bool:
        return (self.chain, self.key, self.ca) == (other.chain, other.key, other.ca)


class _Source:
    """Keeps the last valid files' bytes. Thread-safe."""

    def __init__(self, paths: _Paths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._complaint = ""
        self._good = _read(paths)
        self._log("certificate read")

    def current(self) -> _Material:
        """Return the files' bytes if they are valid, else the last valid ones."""
        with self._lock:
            try:
                found = _read(self._paths, known=self._good)
            except SettingsError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.warning("new certificates unusable; the old ones stay", reason=error)
                return self._good
            self._complaint = ""
            if found is not self._good:
                self._good = found
                self._log("certificate changed")
            return self._good

    def _log(self, event: str) -> None:
        if self._paths.cert is None:
            log.info(event, file=self._paths.ca)
            return
        days = int((self._good.expires_at_s - time.time()) / _DAY_S)
        write = log.warning if days < _SOON_DAYS else log.info
        write(event, file=self._paths.cert, days_left=days)


def _read(paths: _Paths, known: _Material | None = None) -> _Material:
    """Read and check the files; return ``known`` itself when nothing changed.

    Raises:
        SettingsError: a file is missing or invalid.
    """
    found = _Material(
        chain=_bytes(paths.prefix + "cert-file", paths.cert),
        key=_bytes(paths.prefix + "key-file", paths.key),
        ca=_bytes(paths.ca_flag, paths.ca),
    )
    if known is not None and known.same_bytes(found):
        return known
    if paths.ca is not None:
        _certificates(paths.ca_flag, paths.ca, found.ca)
    if paths.cert is None or paths.key is None:
        return found
    leaf = _certificates(paths.prefix + "cert-file", paths.cert, found.chain)[0]
    _check_key(paths, leaf, found.key)
    if leaf.not_valid_after_utc <= datetime.now(UTC):
        raise SettingsError(
            f"{paths.prefix}cert-file: the certificate in {paths.cert} expired on "
            f"{leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        )
    return _Material(found.chain, found.key, found.ca, leaf.not_valid_after_utc.timestamp())


def _bytes(flag: str, path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{flag}: can't read {path}: {error.strerror}") from error


def _certificates(flag: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise SettingsError(f"{flag}: {path} holds no usable PEM certificate") from error
    # The parser ignores a last block that is cut short, as in a file that is still being written.
    if len(found) != pem.count(b"-----BEGIN "):
        raise SettingsError(f"{flag}: {path} holds a PEM block that is no whole certificate")
    return found


def _check_key(paths: _Paths, leaf: x509.Certificate, pem: bytes) -> None:
    flag = paths.prefix + "key-file"
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingsError(
            f"{flag}: {paths.key} holds no usable PEM private key (an encrypted one is none)"
        ) from error
    spki = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*spki) != leaf.public_key().public_bytes(*spki):
        raise SettingsError(
            f"{flag}: the private key in {paths.key} is not that of the certificate in {paths.cert}"
        )


def _configuration(material: _Material) -> grpc.ServerCertificateConfiguration:
    # A new one each time: gRPC frees it.
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.chain)], material.ca or None
    )
