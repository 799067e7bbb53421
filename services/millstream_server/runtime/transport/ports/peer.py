"""Who is at the other end of a connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_server.runtime.security.certificate_names import CertificateName, names_in


def peer_name(sockaddr: Any) -> str:
    """Return an address of a socket's other end as gRPC writes it: ipv4:127.0.0.1:4711."""
    if not isinstance(sockaddr, tuple):
        return "unix:"
    host, port = sockaddr[:2]
    if host.startswith("::ffff:") and "." in host:
        host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def certificate_names(transport: Any) -> Sequence[CertificateName] | None:
    """Return the names in the certificate that the other end has shown; None: it has shown none."""
    secured = transport.get_extra_info("ssl_object")
    der = secured.getpeercert(binary_form=True) if secured is not None else None
    return None if der is None else names_in(der)
