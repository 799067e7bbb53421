"""What a caller sends is counted by the memory that it takes, however small its messages are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.transport.inbox import END, Inbox
from millstream_server.runtime.transport.output import PREFIX


@dataclass
class Bounds:
    received: Ledger = field(default_factory=lambda: Ledger(1 << 30))


@dataclass(eq=False)
class Connection:
    caller_key: str = "a"
    bounds: Bounds = field(default_factory=Bounds)


async def test_many_small_messages_count_as_what_they_take() -> None:
    connection: Any = Connection()
    inbox = Inbox(connection, 1, b"identity", 1000, bytes)
    inbox.ended = True
    assert inbox.feed((PREFIX.pack(0, 2) + b"ab") * 9000, 0)
    inbox.count()
    assert connection.bounds.received.used == inbox.held_bytes > 9000 * 50
    while inbox:
        assert await inbox.read() == b"ab"
    assert await inbox.read() is END
    assert connection.bounds.received.used == 0
