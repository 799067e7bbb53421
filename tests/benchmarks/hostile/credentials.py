"""Keys and certificates of the normal client, the attacker and the Processor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.support.wire.certificates import Authority, Issued

NORMAL_KEY, ATTACKER_KEY = "s" * 32, "a" * 32
NAME = "processor.example"
_PEER = "spiffe://example.org/normal"


@dataclass(frozen=True)
class Files:
    """A folder with all of them."""

    folder: Path

    def make(self) -> None:
        """Write them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        authority = Authority()
        self._put("server", authority.issue(NAME))
        self._put("normal", authority.issue_uri(_PEER))
        self._put("attacker", authority.issue_uri(dns=(_PEER,)))
        keys = self.folder / "keys"
        keys.write_text(f"alice:{NORMAL_KEY}\nmallory:{ATTACKER_KEY}\n")
        keys.chmod(0o600)

    def _put(self, name: str, issued: Issued) -> None:
        (self.folder / f"{name}.crt").write_bytes(issued.cert)
        (self.folder / f"{name}.key").write_bytes(issued.key)
        (self.folder / "ca.crt").write_bytes(issued.ca)

    def _path(self, name: str) -> str:
        return os.fspath(self.folder / name)

    def flags(self, *, tls: str, keys: bool) -> dict[str, object]:
        """Return the Processor's flags."""
        flags: dict[str, object] = {}
        if keys:
            flags["api_keys_file"] = self._path("keys")
        if tls:
            flags |= {
                "tls_cert_file": self._path("server.crt"),
                "tls_key_file": self._path("server.key"),
            }
        if tls == "mtls":
            flags |= {"tls_client_ca_file": self._path("ca.crt"), "allowed_peers": _PEER}
        return flags

    def of_sound(self, tls: str) -> dict[str, str]:
        """Return what the normal client needs besides a key."""
        options = {"ca": self._path("ca.crt"), "name": NAME} if tls else {}
        if tls == "mtls":
            options |= {
                "cert": self._path("normal.crt"),
                "private_key": self._path("normal.key"),
            }
        return options

    def of_attacker(self, attack: str) -> dict[str, object]:
        """Return the knobs of an attacker with a certificate: CA, private key, certificate."""
        if attack != "connections.certificate":
            return {}
        names = ("ca.crt", "attacker.key", "attacker.crt")
        return {"files": [self._path(name) for name in names], "name": NAME}
