"""Which RPC of a connection ends when all connections hold too much and this one holds most."""

from __future__ import annotations

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.connection import Connection
from millstream_server.runtime.transport.limits.bounds import Bounds
from millstream_server.runtime.transport.options import TransportOptions

log = get_log(__name__)

_RETRY_S = 1.0


def make_bounds(options: TransportOptions) -> Bounds:
    """Make the bounds of a server's connections."""
    return Bounds(
        options,
        shed_stream=shed_stream,
        shed_silent=shed_silent,
        shed_received=shed_received,
        shed_unsent=shed_unsent,
    )


def shed_stream(connection: Connection) -> bool:
    """End an RPC: the oldest without a message, else the newest; return False if there is none."""
    if shed_silent(connection):
        return True
    stream = next(reversed(connection.streams.values()), None)
    if stream is None:
        return False
    connection.over(stream.id)
    stream.fail(_error("streams", "too many RPCs are open, and this caller has most of them"))
    return True


def shed_silent(connection: Connection) -> bool:
    """End the oldest RPC whose first message has not come; return False if there is none."""
    stream = next(iter(connection.silent.values()), None)
    if stream is None:
        return False
    connection.over(stream.id)
    why = "too many RPCs are open without a message, and this caller has most of them"
    stream.fail(_error("streams", f"{why}; send the first message at once"))
    return True


def shed_received(connection: Connection) -> bool:
    """End the RPC whose unread requests are largest, or the connection if its headers are larger.

    Return False if there are none.
    """
    stream = max(connection.streams.values(), key=lambda s: s.inbox.held_bytes, default=None)
    if stream is None or stream.inbox.held_bytes <= connection.block.nbytes:
        if not connection.block.nbytes:
            return False
        connection.block.drop(connection)
        connection.enhance_your_calm("too many headers of all callers haven't come whole")
        return True
    why = "too many bytes of requests are under way, and most of them are of this caller"
    stream.fail(_error("received_bytes", f"{why}; send fewer large requests at once"))
    return True


def shed_unsent(connection: Connection) -> bool:
    """End the RPC whose unsent response is largest, or the connection if only its socket is full.

    Return False if nothing waits.
    """
    stream = max(connection.streams.values(), key=lambda s: s.sender.unsent_bytes, default=None)
    if stream is None or not stream.sender.unsent_bytes:
        if not connection.stuck_bytes:
            return False
        connection.abort()
        return True
    why = "too many responses wait for callers that don't read, and this caller has most of them"
    stream.fail(_error("unsent_bytes", f"{why}; read them"))
    return True


def _error(cause: str, why: str) -> OverloadedError:
    """Make the error of an RPC that is ended for a bound, and count it."""
    metrics.ADMISSION_REFUSED.labels(cause).inc()
    log.warning("RPC ended to stay within a bound", bound=cause)
    return OverloadedError(f"the server is busy: {why}", retry_delay_s=jittered(_RETRY_S))
