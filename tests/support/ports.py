"""Ports for services under test."""

from __future__ import annotations

import itertools
import os
import socket

# Below the range that Linux takes the ports of outgoing connections from (32768 and up): such a
# connection may take a port between the moment it is found and the moment a service listens on it.
_FIRST, _COUNT = 12_000, 18_000
_offsets = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """Find a port that nobody uses; a test process gets each one once."""
    for _ in range(_COUNT):
        port = _FIRST + next(_offsets) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {_FIRST} to {_FIRST + _COUNT - 1} is free")
