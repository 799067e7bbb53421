"""A sender or a receiver of embeddings in a process of its own, which does what it is told.

`python -m tests.support.media.embedding_process sender|receiver auto|inline|shared_memory|nixl`;
commands and results are lines of JSON on stdin and stdout. `started` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import uvloop

from millstream.v1 import media_pb2
from millstream_server.encode.fetching.fetch import EmbeddingFetcher
from millstream_server.encode.transfer.settings import Transfer
from millstream_server.media.items import EmbeddingTicket
from millstream_server.protobuf.media import ticket_from_proto, ticket_to_proto
from millstream_server.runtime.errors import ServingError
from tests.support.media.embeddings import TICKETS, Held, hold, sending, ways_taken

Do = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def to_hex(ticket: EmbeddingTicket) -> str:
    return ticket_to_proto(ticket).SerializeToString().hex()


def from_hex(text: str) -> EmbeddingTicket:
    message = media_pb2.EmbeddingTicket.FromString(bytes.fromhex(text))
    return ticket_from_proto(message, "ticket")


class Peer:
    """The process, from the test's side."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, **command: Any) -> dict[str, Any]:
        """Give a command and return its result."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        line = await self.process.stdout.readline()
        assert line, f"the process ended with {await self.process.wait()}"
        result: dict[str, Any] = json.loads(line)
        return result

    async def ticket(self, nbytes: int) -> EmbeddingTicket:
        """Let a sender put the tensor of this size up."""
        return from_hex((await self.ask(put=nbytes))["ticket"])

    async def fetch(self, ticket: EmbeddingTicket) -> dict[str, Any]:
        """Let a receiver fetch it."""
        return await self.ask(fetch=to_hex(ticket))

    async def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@contextlib.asynccontextmanager
async def started(
    role: Literal["sender", "receiver"], transfer: Transfer = Transfer.AUTO
) -> AsyncIterator[Peer]:
    """Start the process; kill it at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, role, transfer.value, stdin=PIPE, stdout=PIPE
    )
    peer = Peer(process)
    try:
        yield peer
    finally:
        await peer.kill()


# ---- in the process ------------------------------------------------------------------------------


async def _send(transfer: Transfer, run: Callable[[Do], Awaitable[None]]) -> None:
    async with sending(transfer=transfer, capacity_bytes=1 << 30) as sender:

        async def do(command: dict[str, Any]) -> dict[str, Any]:
            if "put" in command:
                return {"ticket": to_hex(sender.ticket(command["put"]))}
            return {"cpu_s": time.process_time()}

        await run(do)


async def _receive(transfer: Transfer, run: Callable[[Do], Awaitable[None]]) -> None:
    fetcher = EmbeddingFetcher(TICKETS, transfer=transfer, timeout_s=60.0)
    held: list[Held] = []

    async def do(command: dict[str, Any]) -> dict[str, Any]:
        if "hold" in command:
            held.append(await hold(from_hex(command["hold"]), transfer))
            return {"way": held[-1].way}
        if "fetch" not in command:
            return {"cpu_s": time.process_time(), "ways": ways_taken()}
        began_s = time.perf_counter()
        try:
            tensor = await fetcher.fetch(from_hex(command["fetch"]))
        except ServingError as error:
            return {"error": error.reason}
        took_s = time.perf_counter() - began_s
        return {
            "s": took_s,
            "sha256": hashlib.sha256(tensor.data).hexdigest(),
            "ways": ways_taken(),
        }

    await run(do)
    await fetcher.close()


async def _obey(results: int, do: Do) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        result = await do(json.loads(line))
        os.write(results, json.dumps(result).encode() + b"\n")


def main() -> None:
    """Do what stdin says until it closes."""
    role, transfer = sys.argv[1], Transfer(sys.argv[2])
    results = os.dup(1)
    os.dup2(2, 1)  # NIXL prints
    act = _send if role == "sender" else _receive

    async def run() -> None:
        await act(transfer, lambda do: _obey(results, do))

    uvloop.run(run())


if __name__ == "__main__":
    main()
