"""API keys and their holders, from a file that may change and from the environment.

An entry is `NAME:KEY` or, to keep the key itself out of the file, `NAME:sha256:HEX`. A name may
have several keys, such as the old and the new one during a rotation. A file has one entry per line,
with `#` for comments; the environment separates entries with commas.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

FILE_SETTING = "--api-keys-file"
ENV_SETTING = "MILLSTREAM_API_KEYS"
MIN_KEY_CHARACTERS = 16
"""Digests are fast and unsalted: safe for long random keys only; short ones can be guessed."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-+\--~]+")  # visible ASCII without comma, valid in metadata and in the list
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MOST_BYTES = 1 << 20
_RACY_S = 2.0
"""A file changed so recently may change again without a new time stamp."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    digest: bytes


class ApiKeys:
    """Finds the holder of a key.

    The file's time stamp is checked on every call, and a changed file is read again: a revoked key
    is refused from the next RPC on. If the file can't be read, has a bad entry or may be written by
    everybody, the old keys stay.
    """

    def __init__(
        self, *, file: Path | None = None, inline: str = "", variable: str = ENV_SETTING
    ) -> None:
        """Read both sources; ``variable`` is where ``inline`` comes from, for errors.

        Raises:
            SettingsError: an entry is bad, there is no key, or everybody may write to the file; the
                text contains no key.
        """
        self._file = file
        self._fixed = _parse(inline.split(","), variable, "entry")
        self._stamp: tuple[int, ...] | None = None
        self._complaint = ""
        self._entries: tuple[_Entry, ...] = self._fixed
        if file is not None:
            self._entries = self._read(file)
            if file.stat().st_mode & stat.S_IROTH:
                why = "the file of API keys is readable by everybody; change its mode"
                log.warning(why, file=file)
        elif not self._fixed:
            raise SettingsError(f"{variable}: holds no key")
        _check_unique(self._entries)
        log.info("API keys read", holders=self._names())

    def name_of(self, key: str) -> str | None:
        """Return the name of the key's holder, or None; takes the same time for every key."""
        self._refresh()
        presented = hashlib.sha256(key.encode()).digest()
        found = None
        for entry in self._entries:  # always to the end: the time must not depend on the key
            if hmac.compare_digest(entry.digest, presented):
                found = entry.name
        return found

    def _refresh(self) -> None:
        if self._file is None:
            return
        try:
            status = self._file.stat()
            stamp = (status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size)
            if stamp == self._stamp:
                return
            # A second change within the clock's resolution would have the same time stamp.
            self._stamp = stamp if time.time() - status.st_ctime > _RACY_S else None
            entries = self._read(self._file)
        except (SettingsError, OSError) as error:
            problem = str(error) if isinstance(error, SettingsError) else _cannot_read(error)
            if problem != self._complaint:
                self._complaint = problem
                log.warning("new API keys unusable; the old ones stay", reason=problem)
            return
        self._complaint = ""
        if entries != self._entries:
            self._entries = entries
            log.info("API keys changed", holders=self._names())

    def _read(self, file: Path) -> tuple[_Entry, ...]:
        try:
            with file.open("rb") as source:
                mode = os.fstat(source.fileno()).st_mode
                data = source.read(_MOST_BYTES + 1)
        except OSError as error:
            raise SettingsError(_cannot_read(error)) from error
        if mode & stat.S_IWOTH:
            raise SettingsError(
                f"{FILE_SETTING}: every user of this machine may write to {file}, and so let "
                f"themselves in: chmod o-w {file}"
            )
        if len(data) > _MOST_BYTES:
            raise SettingsError(f"{FILE_SETTING}: more than 1 MiB is no list of keys")
        try:
            lines = data.decode().splitlines()
        except UnicodeDecodeError as error:
            raise SettingsError(f"{FILE_SETTING}: is not UTF-8 text") from error
        own = _parse(lines, FILE_SETTING, "line")
        if not own:
            raise SettingsError(f"{FILE_SETTING}: holds no key")
        _check_unique(self._fixed + own)
        return self._fixed + own

    def _names(self) -> str:
        return ",".join(sorted({entry.name for entry in self._entries}))


def _cannot_read(error: OSError) -> str:
    return f"{FILE_SETTING}: can't read {error.filename}: {error.strerror}"


def _parse(texts: Iterable[str], source: str, unit: str) -> tuple[_Entry, ...]:
    entries = []
    for number, text in enumerate(texts, 1):
        entry = text.strip()
        if entry and not entry.startswith("#"):
            entries.append(_parse_entry(entry, f"{source}: {unit} {number}"))
    return tuple(entries)


def _parse_entry(text: str, where: str) -> _Entry:
    """Read one entry; errors never quote it, since it may be a secret."""
    name, colon, rest = text.partition(":")
    if not (colon and _NAME.fullmatch(name)):
        raise SettingsError(
            f"{where} is not NAME:KEY or NAME:sha256:HEX (a name: letters, digits, '.', '_', '-')"
        )
    algorithm, colon, digest = rest.partition(":")
    if colon and algorithm == "sha256":
        if not _DIGEST.fullmatch(digest):
            raise SettingsError(f"{where}: a SHA-256 has 64 hex digits")
        return _Entry(name, bytes.fromhex(digest))
    if len(rest) < MIN_KEY_CHARACTERS:
        raise SettingsError(
            f"{where}: a key has at least {MIN_KEY_CHARACTERS} characters (make one with "
            "`openssl rand -hex 32`)"
        )
    if not _KEY.fullmatch(rest):
        raise SettingsError(f"{where}: a key has visible ASCII characters and no comma")
    return _Entry(name, hashlib.sha256(rest.encode()).digest())


def _check_unique(entries: Iterable[_Entry]) -> None:
    names: dict[bytes, str] = {}
    for entry in entries:
        if names.setdefault(entry.digest, entry.name) != entry.name:
            raise SettingsError(
                f"{FILE_SETTING}, {ENV_SETTING}: {names[entry.digest]} and {entry.name} have the "
                "same key"
            )
