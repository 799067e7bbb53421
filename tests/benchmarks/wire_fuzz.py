"""Ten minutes of connections that no HTTP/2 client should make, to a Processor's public port.

    python -m tests.benchmarks.wire_fuzz                           # ten minutes
    python -m tests.benchmarks.wire_fuzz --seconds 60 --seed 7 --tls
    python -m tests.benchmarks.wire_fuzz --replay failures.jsonl   # connections that a run printed

Each connection carries some normal RPCs, cut into frames; then bits are flipped, frames dropped,
doubled, swapped, cut short, given other heads, or frames and bytes put between. They come from
other addresses than the normal chats that run beside them, for bounds count by caller.

Wanted: every normal chat answered right; no status INTERNAL, UNKNOWN, DATA_LOSS or UNAVAILABLE, no
INTERNAL_ERROR; nothing from the server that isn't HTTP/2; both processes alive at the end, without
open RPCs or work, with the files and threads they had before, their memory flat, and no complaint
in their logs. A failing connection is printed as one line of JSON, its bytes in hex, for --replay.
Connection i of a seed is always the same.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from millstream_testing.waiting import until
from tests.benchmarks.fuzzing.connections import play_wire
from tests.benchmarks.fuzzing.frames import WireScript, make_wire_script
from tests.benchmarks.fuzzing.seeds import seeds
from tests.benchmarks.fuzzing.targets import discover
from tests.benchmarks.hostile.results import MOST_PIECE_MS, MOST_PIECES_MS
from tests.benchmarks.outcomes import Plan, chat
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.processes.ports import free_port
from tests.support.processes.processes import Sampler, kind_of
from tests.support.processes.simulated_suite import SimulatedSuite, channels_to
from tests.support.processes.suite import ServiceProcess
from tests.support.telemetry.scraping import LoopPieces, scrape
from tests.support.wire.certificates import Authority, SecretMount

_AT_ONCE = 24
_CANARY_PAUSE_S = 0.1
_CANARY_GUARD_S = 20.0
_SHOWN = 20
_JUDGED_S = 300
"""Memory, and pieces of the loop, are judged in runs this long: buffers and caches fill by and by,
and a machine that does other things besides counts its interrupts among the pieces."""
_OPEN = "millstream_rpc_server_open"


@dataclass
class WireFuzz:
    """One run."""

    suite: SimulatedSuite
    metrics_port: int
    """Of the Processor."""
    arguments: argparse.Namespace
    verdict: Verdict = field(default_factory=Verdict)
    seen: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    canaries: int = 0
    ends_at: float = 0.0
    tls: ssl.SSLContext | None = None
    """Of the connections; None: they have no TLS."""

    def __post_init__(self) -> None:
        """Trust the Processor's certificate, if it has one."""
        if ca := self._processor.ca:
            self.tls = ssl.create_default_context(cadata=ca.decode())
            self.tls.set_alpn_protocols(["h2"])

    @property
    def _processor(self) -> ServiceProcess:
        return self.suite.services["processor"]

    def _sound(self) -> Mapping[str, Sequence[bytes]]:
        """Return messages for each method of the Processor, by path."""
        found = discover("processor", self._processor.address, self._processor.channel())
        return {target.path: seeds(target.method.full_name) or [b""] for target in found}

    def _over(self) -> bool:
        return time.monotonic() >= self.ends_at

    async def _play(self, script: WireScript, number: int) -> str:
        source = f"127.0.{number % 7 + 1}.{number % 200 + 1}"
        problem = await play_wire(script, self._processor.port, source, self.seen, self.tls)
        if not self._processor.alive:
            problem = "the Processor is dead"
        if problem:
            kind = kind_of(problem[:200])
            self.problems[kind] += 1
            if self.problems[kind] <= 2:
                progress(f"{problem}\n{script.to_json()}")
        return problem

    async def _by_chance(
        self, numbers: Iterator[int], normal: Mapping[str, Sequence[bytes]]
    ) -> None:
        for number in numbers:
            if self._over():
                return
            chance = random.Random(f"{self.arguments.seed}/{number}")
            await self._play(make_wire_script(chance, normal), number)

    async def _canary(self) -> None:
        """Chat as clients do, beside it all, on one connection."""
        async with channels_to(self._processor, 1) as (stub,):
            while not self._over():
                outcome = await chat(stub, Plan.FINISH, 5, guard_s=_CANARY_GUARD_S)
                self.canaries += 1
                if outcome.code != "OK" or outcome.wrong:
                    self.verdict.broken.append(
                        f"canary: {outcome.label} {outcome.message} {outcome.wrong}"
                    )
                await asyncio.sleep(_CANARY_PAUSE_S)

    async def run(self, replay: Sequence[WireScript]) -> Verdict:
        """Fuzz, calm down, check."""
        suite, verdict = self.suite, self.verdict
        await suite.until_connected()
        normal = await asyncio.to_thread(self._sound)
        before = suite.footprints()
        sampler = Sampler(
            {n: lambda s=s: s.pid for n, s in suite.services.items()}  # type: ignore[misc]
        )
        pieces = LoopPieces.of(self.metrics_port)
        async with sampler.running():
            if replay:
                for number, script in enumerate(replay):
                    progress(await self._play(script, number) or "nothing wrong")
            else:
                self.ends_at = time.monotonic() + self.arguments.seconds
                numbers = itertools.count()
                players = [self._by_chance(numbers, normal) for _ in range(_AT_ONCE)]
                await asyncio.gather(self._canary(), *players)
        if self._processor.alive:
            self._judge_pieces(LoopPieces.of(self.metrics_port).since(pieces))
        await self._check(before)
        self._judge_memory(sampler)
        verdict.measured |= {
            "seed": self.arguments.seed,
            "connections": self.seen.pop("connections", 0),
            "canaries": self.canaries,
            "ends": dict(self.seen.most_common()),
        }
        verdict.broken += [f"{n} x {kind}" for kind, n in self.problems.most_common(_SHOWN)]
        return verdict

    async def _check(self, before: Any) -> None:
        suite, verdict = self.suite, self.verdict
        for name, service in suite.services.items():
            verdict.expect(service.alive, f"{name} died")
        if self._processor.alive:
            try:
                await until(self._none_open, 10)
            except AssertionError:
                verdict.broken.append(f"{_OPEN} is not 0 after 10 s")
        await suite.expect_idle(verdict)
        await suite.expect_no_leak(verdict, before)
        await suite.stop(verdict)
        suite.expect_no_complaints(verdict)

    async def _none_open(self) -> bool:
        families = (await scrape(self.metrics_port)).families
        return all(sample.value == 0 for sample in families[_OPEN].samples)

    def _judge_pieces(self, pieces: LoopPieces) -> None:
        found = {"longest": pieces.within_ms(), "p99.99": pieces.within_ms(0.9999)}
        self.verdict.measured["pieces of the loop, at most ms"] = found
        if self.arguments.seconds >= _JUDGED_S:
            held = found["longest"] <= MOST_PIECE_MS and found["p99.99"] <= MOST_PIECES_MS
            self.verdict.expect(held, f"pieces of the loop took {found}")

    def _judge_memory(self, sampler: Sampler) -> None:
        memory = self.verdict.measured["memory"] = {}
        for name in self.suite.services:
            if (growth := sampler.growth(name)) is None:
                continue
            memory[name] = asdict(growth)
            if self.arguments.seconds >= _JUDGED_S:
                self.verdict.expect(growth.flat, f"memory of {name} grows: {growth}")


def _certificate(folder: Path) -> tuple[dict[str, object], bytes]:
    """Make one; return the Processor's flags for it, and the CA as PEM."""
    files = SecretMount(folder)
    issued = Authority().issue("127.0.0.1", "localhost")
    files.put(issued)
    return {"tls_cert_file": files.cert, "tls_key_file": files.key}, issued.ca


def run(arguments: argparse.Namespace) -> Verdict:
    """Start a Processor and its worker, fuzz the Processor."""
    replay = []
    if arguments.replay:
        replay = [WireScript.from_json(line) for line in arguments.replay.read_text().splitlines()]
    with folder_for(arguments) as folder:
        suite = SimulatedSuite(folder, {"simulated_step_s": 0.001})
        suite.add_worker("worker")
        metrics_port = free_port()
        certificate, ca = _certificate(folder / "tls") if arguments.tls else ({}, b"")
        processor = suite.add_processor(
            "processor", metrics_listen=f"127.0.0.1:{metrics_port}", **certificate
        )
        processor.ca = ca
        with suite.running():
            verdict: Verdict = uvloop.run(WireFuzz(suite, metrics_port, arguments).run(replay))
        return verdict


def main() -> int:
    """Parse arguments, fuzz, report."""
    parser = parser_of("wire_fuzz", __doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long (600)")
    parser.add_argument("--seed", type=int, default=1, help="another one makes others (1)")
    parser.add_argument("--tls", action="store_true", help="all of it inside TLS")
    parser.add_argument("--replay", type=Path, help="file of connections to make again, as JSON")
    arguments = parser.parse_args()
    return run(arguments).conclude(as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
