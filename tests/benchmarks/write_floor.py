"""What writes to sockets cost by themselves: the least that an event for each stream can cost.

    python -m tests.benchmarks.write_floor

Every 10 ms a bare loop writes an event of 230 bytes to each of 64 sockets, as HTTP/1.1 needs, or 16
messages of 45 bytes at once to each of 4, as gRPC does on four connections. CPU of the loop's own
process, with the kernel's part; another process reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import uvloop

_EVERY_S, _SECONDS = 0.01, 3.0
_WAYS = {"64 sockets, an event each": (64, 230, 1), "4 sockets, 16 messages each": (4, 45, 16)}
_ROUNDS = 3


async def _write(ends: Connection, sockets: int, data: bytes) -> float:
    """Write to so many sockets for a while; return the CPU seconds of one write."""
    made: list[Any] = []
    all_made = asyncio.Event()

    class Written(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)
            if len(made) == sockets:
                all_made.set()

    server = await asyncio.get_running_loop().create_server(Written, "127.0.0.1", 0)
    ends.send(server.sockets[0].getsockname()[1])
    await all_made.wait()
    began_s, due_s, count = time.process_time(), time.monotonic(), 0
    until_s = due_s + _SECONDS
    while due_s < until_s:
        for transport in made:
            transport.write(data)
        count += sockets
        due_s += _EVERY_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return (time.process_time() - began_s) / count


def _read(ends: Connection, sockets: int) -> None:
    async def read() -> None:
        port = ends.recv()
        for _ in range(sockets):
            await asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", port)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(read())


def main() -> None:
    """Measure and print."""
    context = multiprocessing.get_context("spawn")
    for _ in range(_ROUNDS):
        for name, (sockets, nbytes, tokens) in _WAYS.items():
            here, there = context.Pipe()
            reader = context.Process(target=_read, args=(there, sockets), daemon=True)
            reader.start()
            cost_s = uvloop.run(_write(here, sockets, b"x" * nbytes * tokens))
            reader.kill()
            reader.join()
            print(f"{name}: {cost_s / tokens * 1e6:.2f} µs a token")  # noqa: T201


if __name__ == "__main__":
    main()
