"""Settings of the HTTP door in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_server.runtime.lifecycle.client_port_settings import ClientPortSettings
from millstream_server.runtime.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings(ClientPortSettings):
    """Read by `python -m millstream_server.door`."""

    processors: tuple[str, ...] = setting(
        help="where the Processors are, one or more of HOST:PORT, dns:NAME:PORT, k8s:SERVICE, "
        "k8s:NAMESPACE/SERVICE and file:PATH, separated by commas; all serve the same models"
    )
    processor_tls_dir: Path | None = setting(
        None,
        help="folder with ca.crt, PEM CAs of the Processors' certificates, and, for mTLS, tls.crt "
        "and tls.key, which this door shows to them; turns TLS to Processors on",
    )
    processor_tls_name: str = setting(
        "", help="name in the Processors' certificates, where their addresses are bare IPs"
    )
    page: bool = setting(
        default=True,
        help="a page for browsers at `/`, a chat and an image maker (docs/http.md)",
    )
