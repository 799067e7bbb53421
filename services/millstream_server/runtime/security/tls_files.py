"""The files of a certificate: read again when they change, and checked before they are used.

This module imports `cryptography`, 8 MB: `tls` imports it where TLS is on.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

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
_SETTLED_NS = 2_000_000_000
"""A file that changed this short a time ago is read again: a further change may have the same time
stamp. Some file systems count in seconds."""


@dataclass(frozen=True, slots=True)
class Paths:
    """The files of a client or a server, and their settings' names."""

    cert_flag: str
    key_flag: str
    ca_flag: str
    cert: Path | None
    key: Path | None
    ca: Path | None


@dataclass(frozen=True, slots=True)
class Material:
    """The bytes of the files; empty where nothing is configured."""

    chain: bytes
    key: bytes
    ca: bytes
    expires_at_s: float = math.inf

    def same_bytes(self, other: Material) -> bool:
        return (self.chain, self.key, self.ca) == (other.chain, other.key, other.ca)


class Source:
    """Keeps the last valid files' bytes. Thread-safe."""

    def __init__(self, paths: Paths) -> None:
        """Read and check the files.

        Raises:
            SettingsError: a file is missing or invalid.
        """
        self._paths = paths
        self._lock = threading.Lock()
        self._complaint = ""
        self._stamps = _stamps(paths)
        self._good = _read(paths)
        self._log("certificate read")

    def current(self) -> Material:
        """Return the files' bytes if they are valid, else the last valid ones."""
        with self._lock:
            stamps = _stamps(self._paths)  # before the files are read
            if stamps is not None and stamps == self._stamps:
                return self._good
            self._stamps = stamps
            try:
                found = _read(self._paths, known=self._good)
            except SettingsError as error:
                self._stamps = None  # reading may have failed for another reason than the files
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


def _stamps(paths: Paths) -> tuple[tuple[int, ...], ...] | None:
    """Return what changes when a file does; None while a file has changed only just now."""
    found = []
    for path in (paths.cert, paths.key, paths.ca):
        if path is None:
            continue
        try:
            status = path.stat()
        except OSError:
            return None
        if time.time_ns() - status.st_ctime_ns < _SETTLED_NS:
            return None
        found.append((status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns))
    return tuple(found)


def _read(paths: Paths, known: Material | None = None) -> Material:
    """Read and check the files; return ``known`` itself when nothing changed.

    Raises:
        SettingsError: a file is missing or invalid.
    """
    found = Material(
        chain=_bytes(paths.cert_flag, paths.cert),
        key=_bytes(paths.key_flag, paths.key),
        ca=_bytes(paths.ca_flag, paths.ca),
    )
    if known is not None and known.same_bytes(found):
        return known
    if paths.ca is not None:
        _certificates(paths.ca_flag, paths.ca, found.ca)
    if paths.cert is None or paths.key is None:
        return found
    leaf = _certificates(paths.cert_flag, paths.cert, found.chain)[0]
    _check_key(paths, leaf, found.key)
    if leaf.not_valid_after_utc <= datetime.now(UTC):
        raise SettingsError(
            f"{paths.cert_flag}: the certificate in {paths.cert} expired on "
            f"{leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        )
    return Material(found.chain, found.key, found.ca, leaf.not_valid_after_utc.timestamp())


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


def _check_key(paths: Paths, leaf: x509.Certificate, pem: bytes) -> None:
    flag = paths.key_flag
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
