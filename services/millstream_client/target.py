"""Converts addresses to gRPC targets."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_SCHEMES = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
_HOST_PORT = re.compile(
    r"(?:(?P<name>[\w.-]+)|\[(?P<ip6>[\da-f.]*:[\da-f:.]*)\]):(?P<port>\d{1,5})",
    re.ASCII | re.IGNORECASE,
)


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
