"""Ports for services under test."""

from __future__ import annotations

import itertools
import os
import socket

# Below the range that Linux takes the ports of outgoing connections from (32768 and up): such a
# connection may take a port between the moment it is found and the moment a service listens on it.
_FIRST, _COUNT = 12_000, 18_000
# Processes of pytest-xdist, gw0 and gw1, whose ids are neighbours, begin far from each other.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_offsets = itertools.count(os.getpid() * 97 + _WORKER * 7_919)


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
