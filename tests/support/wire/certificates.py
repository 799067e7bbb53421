"""Certificates made for a test, and files that change the way Kubernetes changes them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate, its key and the CA that signed it, all PEM."""

    cert: bytes
    key: bytes
    ca: bytes

    @property
    def serial(self) -> int:
        return x509.load_pem_x509_certificate(self.cert).serial_number

    @property
    def ends(self) -> dt.datetime:
        return x509.load_pem_x509_certificate(self.cert).not_valid_after_utc


class Authority:
    """A CA of a test's own."""

    def __init__(self) -> None:
        self._ca = trustme.CA()
        self.pem = self._ca.cert_pem.bytes()

    def issue(self, *names: str, days: float = 30, common_name: str | None = None) -> Issued:
        """Sign a certificate for DNS names and IP addresses; a negative ``days`` is in the past."""
        leaf = self._ca.issue_cert(
            *names,
            common_name=common_name,
            not_before=dt.datetime.now(dt.UTC) - 60 * _DAY,
            not_after=dt.datetime.now(dt.UTC) + days * _DAY,
        )
        chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
        return Issued(chain, leaf.private_key_pem.bytes(), self.pem)

    def issue_uri(self, *uris: str, dns: Sequence[str] = ()) -> Issued:
        """Sign a certificate for URIs, SPIFFE ids among them, and any text as DNS names."""
        ca = x509.load_pem_x509_certificate(self.pem)
        ca_key = load_pem_private_key(self._ca.private_key_pem.bytes(), password=None)
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        cert = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(ca.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(
                x509.SubjectAlternativeName(
                    [
                        *(x509.UniformResourceIdentifier(uri) for uri in uris),
                        *(x509.DNSName(name) for name in dns),
                    ]
                ),
                critical=True,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
                    ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
                ),
                critical=False,
            )
            .sign(ca_key, hashes.SHA256())
        )
        return Issued(
            cert.public_bytes(Encoding.PEM),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            self.pem,
        )


class SecretMount:
    """A directory as the kubelet mounts a secret: every file is a link through `..data`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._version = 0

    @property
    def cert(self) -> Path:
        return self.root / "tls.crt"

    @property
    def key(self) -> Path:
        return self.root / "tls.key"

    @property
    def ca(self) -> Path:
        return self.root / "ca.crt"

    def of_ca(self) -> Path:
        """Return a folder with the CA alone, which a client has that shows no certificate."""
        folder = self.root / "ca"
        folder.mkdir(exist_ok=True)
        (folder / "ca.crt").write_bytes(self.ca.read_bytes())
        return folder

    def put(self, issued: Issued, ca: bytes | None = None) -> None:
        """Replace all files at once, by one rename of the `..data` link."""
        self.put_files({"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": ca or issued.ca})

    def put_files(self, files: dict[str, bytes]) -> None:
        self._version += 1
        version = self.root / f"..{self._version}"
        version.mkdir(parents=True)
        for name, data in files.items():
            (version / name).write_bytes(data)
            if not (self.root / name).is_symlink():
                (self.root / name).symlink_to(Path("..data", name))
        link = self.root / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self.root / "..data")
