"""Which RPC of a connection ends when all connections hold too much and this one holds most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.telemetry.log import get_log

if TYPE_CHECKING:
    from millstream_server.runtime.transport.connection import Connection

log = get_log(__name__)

_RETRY_S = 1.0


def shed_stream(connection: Connection) -> bool:
    """End an RPC: the oldest without a message, else the newest; return False if there is none."""
    if shed_silent(connection):
        return True
    stream = next(reversed(connection.streams.values()), None)
    if stream is None:
        return False
    connection.over(stream)
    stream.end_with(_error("streams", "too many RPCs are open, and this caller has most of them"))
    return True


def shed_silent(connection: Connection) -> bool:
    """End the oldest RPC whose first message has not come; return False if there is none."""
    stream = next(iter(connection.silent.values()), None)
    if stream is None:
        return False
    connection.over(stream)
    why = "too many RPCs are open without a message, and this caller has most of them"
    stream.end_with(_error("streams", f"{why}; send the first message at once"))
    return True


def shed_received(connection: Connection) -> bool:
    """End the RPC whose unread requests are largest, or the connection if its headers are larger.

    Return False if there are none.
    """
    stream = max(connection.streams.values(), key=lambda s: s.held_bytes, default=None)
    if stream is None or stream.held_bytes <= connection.block_bytes:
        if not connection.block_bytes:
            return False
        connection.drop_block()
        return True
    why = "too many bytes of requests are under way, and most of them are of this caller"
    stream.end_with(_error("received_bytes", f"{why}; send fewer large requests at once"))
    return True


def shed_unsent(connection: Connection) -> bool:
    """End the RPC whose unsent response is largest, or the connection if only its socket is full.

    Return False if nothing waits.
    """
    stream = max(connection.streams.values(), key=lambda s: s.sender.unsent_bytes, default=None)
    if stream is None or not stream.sender.unsent_bytes:
        if not connection.is_stuck:
            return False
        connection.abort()
        return True
    why = "too many responses wait for callers that don't read, and this caller has most of them"
    stream.end_with(_error("unsent_bytes", f"{why}; read them"))
    return True


def _error(cause: str, why: str) -> OverloadedError:
    """Make the error of an RPC that is ended for a bound, and count it."""
    metrics.ADMISSION_REFUSED.labels(cause).inc()
    log.warning("RPC ended to stay within a bound", bound=cause)
    return OverloadedError(f"the server is busy: {why}", retry_delay_s=jittered(_RETRY_S))
