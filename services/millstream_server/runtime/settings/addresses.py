"""Addresses in settings: HOST:PORT."""

from __future__ import annotations

_MAX_PORT = 65535


def is_port(text: str) -> bool:
    """Return whether ``text`` is a port's number."""
    return text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_PORT


def is_host_port(text: str) -> bool:
    """Return whether ``text`` is HOST:PORT; whether there is such a host isn't looked at."""
    host, _, port = text.rpartition(":")
    return bool(host) and is_port(port)
