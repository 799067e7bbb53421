"""What all connections of a server share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millstream_server.runtime.rpc.serving import Method
from millstream_server.runtime.transport.limits.bounds import Bounds
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.ports.probes import States

if TYPE_CHECKING:
    from millstream_server.runtime.transport.connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParts:
    """Given to each connection."""

    find: Callable[[str], Method]
    """Returns the method of a path."""
    options: TransportOptions
    bounds: Bounds
    states: States
    """For HTTP probes."""
    opened: Callable[[Connection], None]
    closed: Callable[[Connection], None]
