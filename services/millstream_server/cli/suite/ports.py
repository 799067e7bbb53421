"""Finds free ports and claims them until the services listen."""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import Self

_LAST_PORT = 65535


class NoPortError(Exception):
    """A port isn't available; the text names it."""


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A stopped suite's connections in TIME_WAIT don't make a port unavailable.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return False
    return True


class PortClaims:
    """Ports that no other `millstream up` on this machine will use; a context manager.

    A service listens only after it has loaded its code, and a second suite may choose its ports in
    the meantime. So each port is also claimed with an abstract Unix socket, whose name only one
    process can bind, and which ends with the process. (Linux only; elsewhere the race remains.)
    """

    def __init__(self) -> None:
        """Start without claims."""
        self._claims = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release all claims."""
        self._claims.close()

    def next_free(self, host: str, start: int) -> int:
        """Claim the first free port from ``start`` up."""
        if not is_free(host, 0):
            raise NoPortError(f"{host} is no address of this machine")
        for port in range(start, _LAST_PORT + 1):
            if self._claim(host, port):
                return port
        raise NoPortError(f"no port from {start} up is free on {host}")

    def exactly(self, host: str, port: int) -> int:
        """Claim this port."""
        if not self._claim(host, port):
            raise NoPortError(f"can't listen on {host}:{port}: it is taken or not this machine's")
        return port

    def _claim(self, host: str, port: int) -> bool:
        if sys.platform == "linux":
            name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                name.bind(f"\0millstream/port/{port}")
            except OSError:
                name.close()
                return False
            self._claims.enter_context(name)
        return is_free(host, port)
