"""Addresses in settings: HOST:PORT."""

from __future__ import annotations

import re

_MAX_PORT = 65535
_DIGITS = 5
_HOST = re.compile(r"[^\s/]+")


def is_port(text: str) -> bool:
    """Return whether ``text`` is a port's number."""
    return (
        text.isascii() and text.isdigit() and len(text) <= _DIGITS and 1 <= int(text) <= _MAX_PORT
    )


def is_host_port(text: str) -> bool:
    """Return whether ``text`` is HOST:PORT, where an IPv6 address has brackets.

    Whether there is such a host isn't looked at.
    """
    host, _, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    return bool(_HOST.fullmatch(host)) and (":" not in host or in_brackets) and is_port(port)
