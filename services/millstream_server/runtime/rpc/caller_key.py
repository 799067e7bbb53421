"""Who a bound by caller counts: a key made of the caller's address.

Authentication replaces it with the caller's name (`runtime.security.auth`).
"""

from __future__ import annotations

import ipaddress
from contextvars import ContextVar
from functools import lru_cache
from urllib.parse import unquote

_NETWORK_BITS = 64
"""Of IPv6 addresses on the Internet: one customer has a whole such network."""


CURRENT_KEY: ContextVar[str] = ContextVar("millstream_caller_key", default="")
"""`Call.caller_key` of the RPC that this task serves; empty outside of RPCs."""


def key_of_address(peer: str) -> str:
    """Return the key of a caller known by its address only, without the port.

    ``peer`` is as `Call.peer`: "ipv4:10.0.0.7:4711" -> "ipv4:10.0.0.7", "ipv6:[::1]:4711" ->
    "ipv6:::1". All addresses of a global IPv6 network of 64 bits have one key. Every caller on a
    Unix socket has the key "unix:".
    """
    kind, _, address = peer.partition(":")
    if kind == "ipv4":
        return peer.rpartition(":")[0]
    if kind == "ipv6":
        return _of_ipv6(address.rpartition(":")[0])
    return f"{kind}:"


@lru_cache(4096)
def _of_ipv6(host: str) -> str:
    host = unquote(host).strip("[]")
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return f"ipv6:{host}"
    if address.ipv4_mapped is not None:
        return f"ipv4:{address.ipv4_mapped}"
    if address.is_global:
        return f"ipv6:{ipaddress.IPv6Network((int(address), _NETWORK_BITS), strict=False)}"
    return f"ipv6:{address}"
