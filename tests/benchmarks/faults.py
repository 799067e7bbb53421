"""Faults of real workers under load, on SGLang on the CPU, KV caches over NIXL: what do chats see?

    python -m tests.benchmarks.faults                                # all rows, half an hour
    python -m tests.benchmarks.faults --chats 60 --rows prefill-killed,decode-cut

A prefill, a decode and an aggregated worker. In each row one of them has a fault when a quarter of
the chats has got tokens, others are in the middle of their transfer, and others wait. Chats of
other workers go on there; those of prefill and decode at the aggregated one, its own at the pair.
Clients don't retry. Every token of every chat is compared with an undisturbed run of its prompt.

Wanted in each row: all chats OK with the right tokens and usage; those that had tokens when prefill
failed don't notice; afterwards no worker holds a KV block, and the way of the fault works again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from millstream.v1 import processor_pb2_grpc
from tests.support.benchmarks.faults import Fault, Victim, small_disk
from tests.support.benchmarks.known_chats import STUCK_S, Chat, KnownChats
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.models.models import make_random_model
from tests.support.processes import forked
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running
from tests.support.processor.chats import until_connected
from tests.support.wire.long_streams import load_of
from tests.support.wire.relay import Relay

_BLOCKS_FREE_S = 60.0
"""SGLang's decode engine keeps the blocks of a broken transfer for 30 s, unless prefill says that
it writes no more: a late write would else land in another request's."""
_CONNECTED_S = 60.0
_SHOWN = 5
_AFTERWARDS = 4
"""Chats that are held when the fault is over."""
_DISK_FULL = "all-disk-full"
_PAUSED = "prefill-engine-stopped"
_UNNOTICED = (_DISK_FULL, "decode-engine-stopped", "aggregated-engine-stopped")
"""A pause is no loss. In all other rows some chats must have gone on elsewhere, or have waited for
a prefill scheduler for as long as it was stopped."""
ROWS = [f"{role}-{fault.name.lower().replace('_', '-')}"
        for role in ("prefill", "decode", "aggregated")
        for fault in Fault if fault is not Fault.DISK_FULL] + [_DISK_FULL]  # fmt: skip


@dataclass
class Row:
    """What came of one row."""

    statuses: Counter[str] = field(default_factory=Counter)
    went_on: Counter[str] = field(default_factory=Counter)
    """Ways, and how many chats."""
    longest_silence_s: float = 0.0
    """Of a chat: between two of its messages, or before the first."""
    blocks_free_s: float = 0.0
    """From the last chat's end and the fault's until no worker held a KV block."""
    broken: list[str] = field(default_factory=list)


@dataclass
class Faults:
    """Workers that run, and the chats that are held over them."""

    workers: Mapping[str, ServiceProcess]
    """Of `prefill`, `decode` and `aggregated` one each."""
    model: Path
    logs: Path
    chats: KnownChats
    stopped_s: float
    """How long a scheduler is stopped whose chats wait for it."""

    async def learn(self) -> None:
        """Note what each prompt is answered while nothing fails."""
        async with self._front("undisturbed", "never") as (stub, _):
            await self.chats.learn(stub)

    @contextlib.asynccontextmanager
    async def _front(self, name: str, handoff: str) -> AsyncIterator[tuple[Any, dict[str, Relay]]]:
        """Run a Processor that reaches each worker by a relay; give a stub."""
        async with contextlib.AsyncExitStack() as stack:
            relays = {
                role: await stack.enter_async_context(Relay(worker.port).laid())
                for role, worker in self.workers.items()
            }
            flags = {
                "models": f"tiny={self.model}",
                "workers": ",".join(relay.address for relay in relays.values()),
                "handoff": handoff,
            }
            front = ServiceProcess(
                "millstream_server.processor", flags, self.logs / f"front-{name}.log"
            )
            stack.push_async_callback(asyncio.to_thread, front.stop)
            await front.start().until_serving()
            channel = await stack.enter_async_context(
                front.aio_channel([("grpc.enable_retries", 0)])
            )
            stub = processor_pb2_grpc.ProcessorServiceStub(channel)
            await until_connected(stub, len(self.workers), _CONNECTED_S)
            yield stub, relays

    async def run(self, name: str, chats: int, at_once: int) -> Row:
        """Run one row."""
        role, _, fault = name.partition("-")
        row = Row()
        handoff = "never" if role == "aggregated" else "always"
        await self._until_serving()
        async with self._front(name, handoff) as (stub, relays):
            victim = Victim(
                self.workers["decode" if role == "all" else role],
                relays["decode" if role == "all" else role],
            )
            held = await self._disturbed(
                stub, victim, Fault[fault.upper().replace("-", "_")], chats, at_once
            )
            row.statuses = Counter(chat.status for chat in held)
            row.went_on = Counter(way for chat in held for way in chat.ways)
            row.longest_silence_s = max(chat.silence_s for chat in held)
            row.broken = _wrong(held, role)
            waited = name == _PAUSED and row.longest_silence_s >= self.stopped_s
            if not (row.went_on or waited or name in _UNNOTICED):
                row.broken.append("no chat noticed the fault")
            row.blocks_free_s = await self._until_idle(row)
            await self._until_serving()
            await until_connected(stub, len(self.workers), _CONNECTED_S)
            after = await asyncio.gather(*(self.chats.hold(stub, i) for i in range(_AFTERWARDS)))
            row.broken += [f"after the fault: {text}" for text in _wrong(after, "all")]
        return row

    async def _disturbed(
        self, stub: Any, victim: Victim, fault: Fault, chats: int, at_once: int
    ) -> Sequence[Chat]:
        """Hold all chats; the fault comes when a quarter of them has tokens."""
        room, with_tokens = asyncio.Semaphore(at_once), asyncio.Semaphore(0)

        async def hold(number: int) -> Chat:
            async with room:
                return await self.chats.hold(stub, number, with_tokens.release)

        async def strike() -> None:
            for _ in range(-(-chats // 4)):
                await with_tokens.acquire()
            await victim.suffer(fault, ended, self.stopped_s)

        ended = asyncio.Event()
        striking = asyncio.ensure_future(strike())
        try:
            held = await asyncio.gather(*(hold(i) for i in range(chats)))
        finally:
            ended.set()
            await asyncio.wait_for(striking, STUCK_S * 3)
        return held

    async def _until_serving(self) -> None:
        """Wait for all workers: one whose engine was stopped gets no requests for a while."""
        for worker in self.workers.values():
            await worker.until_serving()

    async def _until_idle(self, row: Row) -> float:
        """Wait until no worker runs or holds anything; return how long it took."""
        began_s = time.monotonic()
        for name, worker in self.workers.items():
            try:
                async with load_of(worker.address) as load:
                    await load.idle(_BLOCKS_FREE_S)
            except AssertionError as error:
                row.broken.append(f"{name} isn't idle: {error}")
        return time.monotonic() - began_s


def _wrong(chats: Sequence[Chat], role: str) -> list[str]:
    found = Counter(chat.status for chat in chats if chat.status != "OK")
    texts = [f"{count} x {status}" for status, count in found.items()]
    texts += [chat.wrong for chat in chats if chat.wrong][:_SHOWN]
    if role == "prefill":  # who has tokens has its whole cache
        late = sum(chat.went_on_after > 0 for chat in chats)
        if late:
            texts.append(f"{late} chats that had tokens were disturbed")
    return texts


@contextlib.contextmanager
def _fleet(folder: Path, logs: Path) -> Iterator[Faults]:
    model = make_random_model(folder / "model")
    common = {"model_path": model, "model_name": "tiny", "max_total_tokens": 65536}
    pair = {**common, "transfer_timeout_s": 10}
    flags = {
        "prefill": {
            **pair,
            "bootstrap_port": free_port(),
            "engine_args": "--chunked-prefill-size 64 --disable-radix-cache",
        },
        "decode": {**pair, "mode": "disaggregated"},
        "aggregated": common,
    }
    workers = {
        role: ServiceProcess(
            f"millstream_server.{'prefill' if role == 'prefill' else 'decode'}",
            given,
            logs / f"{role}.log",
        )
        for role, given in flags.items()
    }
    with running(*workers.values()):
        yield Faults(workers, model, logs, KnownChats(400, 64), stopped_s=20.0)


async def _all(
    faults: Faults, rows: Sequence[str], arguments: argparse.Namespace, verdict: Verdict
) -> None:
    await faults.learn()
    for name in rows:
        row = await faults.run(name, arguments.chats, arguments.at_once)
        verdict.measured[name] = {k: v for k, v in vars(row).items() if k != "broken"}
        verdict.broken += [f"{name}: {text}" for text in row.broken]
        progress(f"{name}: {dict(row.statuses)} {dict(row.went_on)}, {len(row.broken)} broken")


def main() -> int:
    """Parse arguments, start the workers, run the rows."""
    parser = parser_of("faults", __doc__)
    parser.add_argument("--chats", type=int, default=500, help="chats of a row (500)")
    parser.add_argument("--at-once", type=int, default=48, help="chats at once (48)")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"which, of {', '.join(ROWS)} (all)")
    arguments = parser.parse_args()
    verdict, rows = Verdict(), arguments.rows.split(",")
    forked.begin("services", "sglang")
    try:
        with (
            folder_for(arguments) as folder,
            small_disk(folder / "logs") as mounted,
            _fleet(folder, folder / "logs") as faults,
        ):
            if not mounted and _DISK_FULL in rows:
                rows.remove(_DISK_FULL)
                verdict.measured[_DISK_FULL] = "not run: it takes root to mount a small disk"
            uvloop.run(_all(faults, rows, arguments, verdict))
    finally:
        forked.end()
    return verdict.conclude(as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
