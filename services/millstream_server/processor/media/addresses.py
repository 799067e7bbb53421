"""Which addresses a client's URL may lead to: public ones.

Anything else would let a client read, through this server, what only its network can reach: cloud
metadata, admin ports, neighbours.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# Not public, but `is_global` of some Python versions says otherwise.
_SPECIAL = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")))
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_IPV4 = 0xFFFF_FFFF


def is_public(address: str) -> bool:
    """Return whether a numeric address is reached over the Internet."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv4Address):
        return _is_public_ipv4(found)
    embedded = _embedded(found)
    if embedded is not None:
        return _is_public_ipv4(embedded)
    ordinary = found in _GLOBAL_UNICAST and found.teredo is None
    return ordinary and found.is_global and found.scope_id is None


def _is_public_ipv4(address: IPv4Address) -> bool:
    special = address.is_multicast or address.is_reserved or address.is_unspecified
    return address.is_global and not special and not any(address in net for net in _SPECIAL)


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address at which a mapped, 6to4 or NAT64 address ends."""
    if address in _NAT64:
        return IPv4Address(int(address) & _IPV4)
    return address.ipv4_mapped or address.sixtofour
