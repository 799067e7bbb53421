"""The `ssl.SSLContext` of a server of HTTP/2: what it accepts, each choice with its reason."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

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
