"""What does it cost to move an embedding between two processes of one machine, in each way?

    python -m tests.benchmarks.embedding_transfer
    python -m tests.benchmarks.embedding_transfer --mib 1 16 32 --rounds 30 --json

A sender and a receiver in processes of their own, one fetch at a time, the sender's channel and
memory warm. The time is the receiver's, from the ticket to bytes of its own. CPU time is all of a
process's threads. A core of two that also runs others makes the median worth little: see the best.

Copies are counted in the code, per byte of the embedding, after it is in the sender's store:

- shared_memory, 1: from the mapped segment into memory of the receiver's own.
- nixl, 2: into a registered buffer (by the network card, or by UCX on one machine), and from there.
- inline, 10. Sender: a slice of the store, the message's field, the serialized message, gRPC's
  slice, the kernel. Receiver: the kernel, gRPC's slices joined, the message, its field as `bytes`,
  the tensor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import asdict, dataclass

from millstream_server.encode.transfer import nixl
from millstream_server.encode.transfer.settings import Transfer
from millstream_testing.waiting import until
from tests.support.media.embedding_process import Peer, started, to_hex

MIB = 1 << 20
COPIES = {Transfer.SHARED_MEMORY: 1, Transfer.NIXL: 2, Transfer.INLINE: 10}
_START_S = 60.0


@dataclass(frozen=True)
class Cost:
    """Of one way and one size."""

    way: str
    mib: int
    best_ms: float
    median_ms: float
    sender_cpu_ms: float
    receiver_cpu_ms: float
    copies: int


async def measure(way: Transfer, sizes: list[int], rounds: int) -> list[Cost]:
    """Start both processes and fetch tensors of each size."""
    async with started("sender", way) as sender, started("receiver", way) as receiver:
        return [await _cost(way, mib, rounds, sender, receiver) for mib in sizes]


async def _cost(way: Transfer, mib: int, rounds: int, sender: Peer, receiver: Peer) -> Cost:
    ticket = to_hex(await sender.ticket(mib * MIB))

    async def fetch() -> tuple[float, int]:
        got = await receiver.ask(fetch=ticket, unchecked=True)
        return got["s"], got["ways"].get(f"{way.value} done", 0)

    async def warm() -> bool:
        """NIXL's agents start in the background; the first fetches go inline."""
        _, before = await fetch()
        _, after = await fetch()
        return after == before + 1

    await until(warm, _START_S)
    peers = (sender, receiver)
    before = [(await peer.ask(cpu=True))["cpu_s"] for peer in peers]
    took_s = [(await fetch())[0] for _ in range(rounds)]
    spent = [
        1000 * ((await peer.ask(cpu=True))["cpu_s"] - cpu_s) / rounds
        for peer, cpu_s in zip(peers, before, strict=True)
    ]
    return Cost(
        way=way.value,
        mib=mib,
        best_ms=1000 * min(took_s),
        median_ms=1000 * statistics.median(took_s),
        sender_cpu_ms=spent[0],
        receiver_cpu_ms=spent[1],
        copies=COPIES[way],
    )


def table(costs: list[Cost]) -> str:
    """Lay the figures out for a terminal."""
    row = "{:14}{:>5}{:>10}{:>11}{:>15}{:>17}{:>8}"
    lines = [
        row.format(
            *("way", "MiB", "best ms", "median ms", "sender CPU ms", "receiver CPU ms", "copies")
        )
    ]
    for cost in costs:
        values = asdict(cost).values()
        cells = [f"{value:.1f}" if isinstance(value, float) else value for value in values]
        lines.append(row.format(*cells))
    return "\n".join(lines)


async def run(sizes: list[int], rounds: int) -> list[Cost]:
    """Measure every way that this machine has."""
    ways = [Transfer.SHARED_MEMORY, Transfer.NIXL, Transfer.INLINE]
    if not nixl.available():
        ways.remove(Transfer.NIXL)
    return [cost for way in ways for cost in await measure(way, sizes, rounds)]


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 32], help="sizes (1 16 32)")
    parser.add_argument("--rounds", type=int, default=30, help="fetches per way and size (30)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    costs = asyncio.run(run(arguments.mib, arguments.rounds))
    text = json.dumps([asdict(cost) for cost in costs]) if arguments.json else table(costs)
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
