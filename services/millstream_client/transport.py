"""How a client connects: its target, credentials, channel options, metadata of every call."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from millstream_client import service_config

_SCHEMES = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
_HOST_PORT = re.compile(
    r"(?:(?P<name>[\w.-]+)|\[(?P<ip6>[\da-f.]*:[\da-f:.]*)\]):(?P<port>\d{1,5})",
    re.ASCII | re.IGNORECASE,
)
Metadata = tuple[tuple[str, str], ...]

_inject: Callable[[dict[str, str]], None] | None
try:
    from opentelemetry.propagate import inject as _inject
except ImportError:  # OpenTelemetry isn't installed: no tracing
    _inject = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect."""

    uri: str
    loopback: bool
    """Whether it is certainly this machine, so that nothing can be read on the network."""
    one_server: bool
    """Whether it can only be a single server."""


def parse_target(address: str) -> Target:
    """Read ``host:port``, ``ip1:port1,ip2:port2`` or a gRPC target such as ``dns:///name:port``.

    Raises:
        ValueError: it is none of these.
    """
    scheme, colon, rest = address.partition(":")
    if colon and scheme in _SCHEMES and not rest.isdecimal():
        return _from_uri(address, scheme, rest)
    hosts = [_host(part) for part in address.split(",")]
    if len(hosts) == 1:
        near = _is_loopback(hosts[0])
        return Target(address, loopback=near, one_server=near or _ip(hosts[0]) is not None)
    versions = {ip.version if (ip := _ip(host)) else 0 for host in hosts}
    if versions not in ({4}, {6}):
        raise ValueError(
            f"{address!r}: a list takes IP addresses of one kind; for a name with several "
            "addresses give dns:///NAME:PORT"
        )
    uri = f"ipv{versions.pop()}:{address}"
    return Target(uri, loopback=all(map(_is_loopback, hosts)), one_server=False)


def _from_uri(address: str, scheme: str, rest: str) -> Target:
    if scheme.startswith("unix"):
        return Target(address, loopback=True, one_server=True)
    if scheme not in ("dns", "ipv4", "ipv6"):
        return Target(address, loopback=False, one_server=False)
    # A DNS target may name its DNS server, which may then resolve localhost to another machine:
    # dns://8.8.8.8/name:port.
    dns_server, path = "", rest.removeprefix("/")
    if rest.startswith("//"):
        dns_server, _, path = rest.removeprefix("//").partition("/")
    hosts = [_host(part) for part in ([path] if scheme == "dns" else path.split(","))]
    near = all(map(_is_loopback, hosts)) and not dns_server
    return Target(address, loopback=near, one_server=False)


def _host(address: str) -> str:
    """Return a host; refuse one that gRPC might read as another, as it decides if a key is safe."""
    match = _HOST_PORT.fullmatch(address)
    if match is None or int(match["port"]) >= 1 << 16:
        raise ValueError(f"{address!r} is not HOST:PORT (an IPv6 HOST stands in brackets)")
    return match["name"] or match["ip6"]


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    ip = _ip(host)
    return ip.is_loopback if ip else host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS to the server; with a certificate and its key, mutual TLS. Files are PEM."""

    ca_file: str | Path | None = None
    """CA of the server's certificate. None: gRPC's built-in roots."""
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str = ""
    """Name in the server's certificate, if it isn't the address's host."""

    def credentials(self) -> Any:
        """Read the files.

        Raises:
            OSError: one can't be read.
            ValueError: one of certificate and key is missing.
        """
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("tls: cert_file and key_file belong together; one is missing")
        ca, key, cert = (
            Path(file).read_bytes() if file is not None else None
            for file in (self.ca_file, self.key_file, self.cert_file)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of a connection that rarely need a change."""

    allow_plaintext_key: bool = False
    """Allow the API key without TLS to other machines: anybody on the network can read it."""
    service_config: Mapping[str, Any] | None = None
    """Replaces the recommended one; its retry policies are ignored, since `Retry` does that."""
    max_message_bytes: int = 64 << 20
    """Largest response message; a long prompt's logprobs exceed gRPC's default of 4 MiB."""
    keepalive_s: float = 20.0
    """Interval of pings on a connection with open calls; without a reply in ten seconds it is lost.
    Servers accept a ping every 5 s and end connections that send more."""
    connect_timeout_s: float = 5.0
    """Longest duration of one attempt to connect."""
    max_reconnect_pause_s: float = 2.0
    """Longest pause between two attempts to connect; gRPC's default of two minutes is too long."""
    channel_args: tuple[tuple[str, str | int], ...] = ()
    """Further gRPC channel arguments; they override ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A channel's settings, and the metadata of every call."""

    uri: str
    args: tuple[tuple[str, Any], ...]
    credentials: Any
    authorization: Metadata

    def open_aio(self) -> grpc.aio.Channel:
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.uri, options=self.args)
        return grpc.aio.secure_channel(self.uri, self.credentials, options=self.args)

    def open_sync(self) -> grpc.Channel:
        if self.credentials is None:
            return grpc.insecure_channel(self.uri, options=self.args)
        return grpc.secure_channel(self.uri, self.credentials, options=self.args)

    def metadata(self) -> Metadata:
        if _inject is None:
            return self.authorization
        carrier: dict[str, str] = {}
        _inject(carrier)
        return (*self.authorization, *carrier.items())


def plan_transport(
    address: str, api_key: str | None, tls: Tls | None, options: Options
) -> Transport:
    """Check the arguments and make a channel's settings of them.

    Raises:
        ValueError: the address is invalid, or an API key would be sent unencrypted.
        OSError: a TLS file can't be read.
    """
    target = parse_target(address)
    if api_key and tls is None and not (target.loopback or options.allow_plaintext_key):
        raise ValueError(
            f"the API key would be sent to {address} unencrypted, where anybody on the network can "
            "read it: set tls=Tls(), or Options(allow_plaintext_key=True) on a trusted network"
        )
    return Transport(
        uri=target.uri,
        args=(*_channel_args(target, tls, options), *options.channel_args),
        credentials=tls.credentials() if tls is not None else None,
        authorization=(("authorization", f"Bearer {api_key}"),) if api_key else (),
    )


def _channel_args(target: Target, tls: Tls | None, options: Options) -> list[tuple[str, Any]]:
    config = options.service_config
    if config is None:
        config = service_config.ONE_SERVER if target.one_server else service_config.RECOMMENDED
    # We retry; gRPC's own retries would multiply the attempts and ignore RetryInfo.
    config = service_config.without_retries(config)
    args: list[tuple[str, Any]] = [
        ("grpc.service_config", service_config.to_json(config)),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # the server sets the limit
        ("grpc.keepalive_time_ms", int(1000 * options.keepalive_s)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # without it grpcio 1.85 waits a minute
        ("grpc.http2.max_pings_without_data", 0),  # a conversation may be idle for long
        ("grpc.min_reconnect_backoff_ms", int(1000 * options.connect_timeout_s)),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", int(1000 * options.max_reconnect_pause_s)),
        # A restart gives pods new addresses; by default gRPC resolves every 30 s at most.
        ("grpc.dns_min_time_between_resolutions_ms", 2_000),
        # A new client must not share an older one's connection and its back-off.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if target.loopback:
        # With http_proxy set, gRPC would connect to this machine through the proxy.
        args.append(("grpc.enable_http_proxy", 0))
    if tls is not None and tls.server_name:
        args.append(("grpc.ssl_target_name_override", tls.server_name))
    return args
