"""Reads the names of a certificate that a caller has shown.

This module imports `cryptography`, 8 MB: it is imported with the first such certificate.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from millstream_server.runtime.security.certificate_names import CertificateName

_MALFORMED = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


def names_in(der: bytes) -> Sequence[CertificateName]:
    """Return the URI and DNS entries of a certificate; none if it is malformed.

    The handshake has checked its signature, not that each part of it can be read.
    """
    try:
        extensions = x509.load_der_x509_certificate(der).extensions
        found = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = found.get_values_for_type(x509.UniformResourceIdentifier)
        hosts = found.get_values_for_type(x509.DNSName)
    except (x509.ExtensionNotFound, *_MALFORMED):
        return []
    return [
        *(CertificateName("uri", name) for name in uris),
        *(CertificateName("dns", name) for name in hosts),
    ]
