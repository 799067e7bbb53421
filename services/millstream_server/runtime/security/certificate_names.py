"""Names that a TLS certificate gives its holder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CertificateName:
    """An entry of the Subject Alternative Name.

    The kind counts: a CA that lets its users choose DNS names may sign "DNS:spiffe://td/processor",
    which isn't the SPIFFE id.
    """

    kind: Literal["uri", "dns"]
    value: str


def names_in(der: bytes) -> Sequence[CertificateName]:
    """Return the URI and DNS entries of a certificate; none if it is malformed.

    The handshake has checked its signature, not that each part of it can be read.
    """
    # Here, since it takes 8 MB: it is needed once a caller has shown a certificate.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415

    try:
        extensions = x509.load_der_x509_certificate(der).extensions
        found = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = found.get_values_for_type(x509.UniformResourceIdentifier)
        hosts = found.get_values_for_type(x509.DNSName)
    except (
        ValueError,
        TypeError,
        UnsupportedAlgorithm,
        x509.InvalidVersion,
        x509.DuplicateExtension,
        x509.ExtensionNotFound,
        x509.UnsupportedGeneralNameType,
    ):
        return []
    return [
        *(CertificateName("uri", name) for name in uris),
        *(CertificateName("dns", name) for name in hosts),
    ]
