"""HTTP/2's error cases, RFC 9113 sections 3 to 8 and RFC 7541: what is sent, what must come back.

Each script runs on a connection of its own, after preface and SETTINGS unless `Case.first` says
otherwise. `CHAT` waits for messages and echoes them, `UNARY` answers one; "hang" never ends.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.support.wire.raw_http2 import (
    ErrorCode,
    Wire,
    data,
    message,
    request_fields,
)
from tests.support.wire.rpc_kinds import SERVICE

UNARY, CHAT = f"/{SERVICE}/Unary", f"/{SERVICE}/Chat"


class Scope(enum.Enum):
    """What the server ends."""

    NOTHING = "nothing"
    """The connection serves the next RPC."""
    STREAM = "stream"
    """RST_STREAM; the connection serves the next RPC."""
    CONNECTION = "connection"
    """GOAWAY, then the connection is closed."""
    CLOSED = "closed"
    """The connection is closed, with a GOAWAY or without."""


@dataclass(frozen=True)
class Case:
    """One way to break the rules, or to bend them."""

    name: str
    scope: Scope
    code: ErrorCode | None
    script: Callable[[Wire], bytes | Awaitable[None]]
    first: bytes | None = None
    """Sent in place of preface and SETTINGS."""
    stream: int = 1
    """The stream that is reset."""


def connection_error(name: str, code: ErrorCode, script: Callable[[Wire], bytes]) -> Case:
    return Case(name, Scope.CONNECTION, code, script)


def stream_error(
    name: str, code: ErrorCode, script: Callable[[Wire], bytes], stream: int = 1
) -> Case:
    return Case(name, Scope.STREAM, code, script, stream=stream)


def fine(name: str, script: Callable[[Wire], bytes]) -> Case:
    return Case(name, Scope.NOTHING, None, script)


PROTOCOL, SIZE = ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR
FLOW_CONTROL, CLOSED = ErrorCode.FLOW_CONTROL_ERROR, ErrorCode.STREAM_CLOSED
MAX_FRAME = 1 << 14
MAX_WINDOW = (1 << 31) - 1


def open_stream(wire: Wire, stream: int = 1, path: str = CHAT) -> bytes:
    """Open a stream that stays open."""
    wire.next_stream = max(wire.next_stream, stream + 2)
    return wire.headers(stream, request_fields(path))


def hang(wire: Wire, stream: int = 1) -> bytes:
    """Send a whole request whose handler doesn't end: the stream is half closed by the client."""
    return open_stream(wire, stream, UNARY) + data(stream, message(b"hang"), end=True)


def finished(then: Callable[[Wire], bytes]) -> Callable[[Wire], Awaitable[None]]:
    """Run an RPC on stream 1 to its end, then send more."""

    async def script(wire: Wire) -> None:
        rpc = wire.rpc(UNARY)
        rpc.send(b"", end=True)
        assert await rpc.code() == 0
        wire.send(then(wire))

    return script
