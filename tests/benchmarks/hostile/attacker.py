"""The process of one attack: it takes an `Order` as JSON and prints a `Report` as JSON.

python -m tests.benchmarks.hostile.attacker '{"attack": "ping", "port": 50051, …}'
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

from tests.benchmarks.hostile.wire import DEFAULT_WINDOW, Connection, Pace, Tally

_LATE_S = 1.0
_AGAIN_S = 0.01
"""Pause before a lost connection is made anew."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What an attacker does, and to whom."""

    attack: str
    port: int
    seconds: float
    source: str = "127.0.0.2"
    """The attacker's own address."""
    sources: int = 1
    """So many addresses, counted up from `source`; connections take turns."""
    key: str | None = None
    alone: bool = False
    """Against a process that discards all: no answer is awaited."""
    bytes_per_s: float = 0.0
    """The most it sends; 0: as much as goes."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """The attack's own arguments."""


@dataclass
class Report:
    """What an attacker did and saw."""

    began: float
    """By the monotonic clock, when its imports were done."""
    seconds: float
    sent_bytes: int
    received_bytes: int
    connections: int
    calls: int
    cpu_s: float
    answers: dict[str, int]
    broken: list[str] = field(default_factory=list)
    """What a control, a caller that must be served, found wrong."""


class Attack:
    """What attacks share: connections, time, counts."""

    def __init__(self, order: Order) -> None:
        """Begin now."""
        self.order = order
        self.tally = Tally()
        self.broken: list[str] = []
        self.pace = Pace(order.bytes_per_s)
        first = int(ipaddress.IPv4Address(order.source))
        numbers = range(first, first + order.sources)
        self._sources = itertools.cycle(str(ipaddress.IPv4Address(n)) for n in numbers)
        self._began = time.monotonic()

    @property
    def left_s(self) -> float:
        return self._began + self.order.seconds - time.monotonic()

    def source(self) -> tuple[str, int]:
        """Return the address that the next connection comes from."""
        return next(self._sources), 0

    async def connect(self, *, window: int = DEFAULT_WINDOW, tops_up: bool = True) -> Connection:
        """Open a connection from the attacker's address."""
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self.tally, self.pace, window=window, alone=self.order.alone),
            "127.0.0.1",
            self.order.port,
            local_addr=self.source(),
        )
        connection.tops_up = tops_up
        return connection

    async def times(self, count: int, work: Callable[[int], Awaitable[None]]) -> None:
        """Do ``work`` so many times at once, each again and again when it ends or is cut off."""

        async def forever(number: int) -> None:
            while True:
                with contextlib.suppress(OSError):
                    await work(number)
                await asyncio.sleep(_AGAIN_S)

        await asyncio.gather(*(forever(i) for i in range(count)))

    async def rate(self, per_s: float) -> None:
        """Return when the next of ``per_s`` things a second may be done; keeps no debts."""
        now = time.monotonic()
        self._next = max(getattr(self, "_next", now), now - 0.05) + 1 / per_s
        await asyncio.sleep(max(0.0, self._next - now))

    def report(self) -> Report:
        """Sum it up."""
        return Report(
            began=self._began,
            seconds=time.monotonic() - self._began,
            sent_bytes=self.tally.sent_bytes,
            received_bytes=self.tally.received_bytes,
            connections=self.tally.connections,
            calls=self.tally.calls,
            cpu_s=time.process_time(),
            answers=dict(self.tally.answers.most_common(12)),
            broken=self.broken,
        )


async def _run(order: Order) -> Report:
    from tests.benchmarks.hostile.attacks import ATTACKS  # noqa: PLC0415 - it imports this module

    attack = Attack(order)
    # Thousands of connections that are being made don't let themselves be cancelled in time.
    last = threading.Timer(order.seconds + _LATE_S, lambda: _end(attack.report()))
    last.daemon = True
    last.start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(order.seconds):
            await ATTACKS[order.attack](attack, **order.knobs)
    last.cancel()
    return attack.report()


def _end(report: Report) -> None:
    """Print the report, and leave all connections to the kernel."""
    print(json.dumps(asdict(report)), flush=True)  # noqa: T201
    os._exit(0)


if __name__ == "__main__":
    _end(uvloop.run(_run(Order(**json.loads(sys.argv[1])))))
