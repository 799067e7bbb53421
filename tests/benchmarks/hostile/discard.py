"""A process that discards what it receives: what an attacker alone costs the machine.

python -m tests.benchmarks.hostile.discard PORT

It opens HTTP/2's windows as wide as they go, so that attackers may send, and answers nothing.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

from tests.benchmarks.hostile import wire

_GREETING = wire.settings({3: wire.MAX_WINDOW, 4: wire.MAX_WINDOW}) + wire.window_update(
    0, wire.MAX_WINDOW - wire.DEFAULT_WINDOW
)


class _Discard(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(_GREETING)  # uvloop's own


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Discard, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)  # noqa: T201
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
