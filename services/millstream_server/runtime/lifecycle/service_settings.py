"""The settings that every service has, besides its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millstream_server.runtime.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Where a service listens, who may call it, its telemetry, its shutdown."""

    listen: str = setting("0.0.0.0:50051", help="address to serve on, HOST:PORT")
    metrics_listen: str = setting(
        "0.0.0.0:9464", help="address of the Prometheus endpoint, /metrics; empty: none"
    )
    admin_listen: str = setting(
        "",
        help="address of the admin services (channelz, AdminService); empty: none. Without TLS it "
        "must be a loopback address",
    )
    health_listen: str = setting(
        "",
        help="plaintext address of grpc.health.v1 alone, for probes that can't speak TLS; empty: "
        "none",
    )
    # ---- who may call
    tls_cert_file: Path | None = setting(
        None, help="PEM certificate chain; turns TLS on; read again when it changes"
    )
    tls_key_file: Path | None = setting(None, help="PEM private key of that certificate")
    tls_client_ca_file: Path | None = setting(
        None, help="PEM CAs whose client certificates are required (mTLS)"
    )
    allowed_peers: tuple[str, ...] = setting(
        (),
        help="mTLS: DNS or URI names of client certificates that may call, comma-separated; a URI "
        "may end in /*; empty: any that the CAs signed",
    )
    admin_peers: tuple[str, ...] = setting(
        (), help="the same for the admin address; with TLS, empty means nobody"
    )
    admin_client_ca_file: Path | None = setting(
        None, help="PEM CAs of operators' certificates; empty: those of --tls-client-ca-file"
    )
    admin_keys: str = setting(
        "",
        help="keys of operators, NAME:KEY or NAME:sha256:HEX, comma-separated; the admin address "
        "then refuses calls without one",
        secret=True,
    )
    # ---- telemetry
    otlp_endpoint: str = setting(
        "", help="OpenTelemetry collector, http://HOST:PORT (gRPC); empty: no tracing"
    )
    trace_sample_ratio: float = setting(
        1.0, help="share of requests traced when the caller hasn't decided, 0 to 1"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", help="debug, info, warning or error"
    )
    log_format: Literal["text", "json"] = setting("text", help="text or json, one line an event")
    # ---- times
    propagation_s: float = setting(
        0.5,
        help="on SIGTERM: how long new requests are still taken while load balancers and peers "
        "learn of it",
    )
    drain_s: float = setting(60.0, help="on SIGTERM: longest wait for running requests")
