"""What a caller sends is counted by the memory that it takes, however small its messages are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millstream_server.runtime.ledger import Ledger
from millstream_server.runtime.transport.inbox import Inbox, prefix


@dataclass
class Bounds:
    received: Ledger = field(default_factory=lambda: Ledger(1 << 30))


@dataclass(eq=False)
class Connection:
    caller_key: str = "a"
    bounds: Bounds = field(default_factory=Bounds)


def test_many_small_messages_count_as_what_they_take() -> None:
    connection: Any = Connection()
    inbox = Inbox(connection, 1, b"identity", 1000)
    assert inbox.feed((prefix(0, 2) + b"ab") * 9000, 0)
    inbox.count()
    assert connection.bounds.received.used == inbox.held_bytes > 9000 * 50
    while inbox:
        assert inbox.take() == b"ab"
    assert connection.bounds.received.used == 0
