"""Ten minutes of requests that no client should send, to every method of every service.

    python -m tests.benchmarks.fuzz                             # ten minutes
    python -m tests.benchmarks.fuzz --seconds 60 --seed 7
    python -m tests.benchmarks.fuzz --only DecodeService
    python -m tests.benchmarks.fuzz --replay failures.jsonl     # calls that a run printed

The methods are those that each process names by reflection. Two sources run beside each other:
Hypothesis, which shrinks what fails, and seeded chance. Both make messages from descriptors and
damage normal ones: bits, lengths, order, pieces of others; the client then closes, cancels, or lets
its deadline pass. A canary, a normal chat, runs beside them and must always be answered right.

Wanted: no status INTERNAL, UNKNOWN, DATA_LOSS or UNAVAILABLE, nor CANCELLED without the client; an
end for every call; every process alive at the end, without open work, with the files and threads
it had before, and with no complaint in its log. A failing call is printed as one line of JSON, its
messages in hex, for --replay. Call i of a seed is always the same (but for the tickets in it).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import hypothesis.strategies as st
import uvloop
from hypothesis.errors import Flaky

from millstream.v1 import processor_pb2_grpc
from tests.benchmarks.fuzzing.scripts import Script, make_script, play
from tests.benchmarks.fuzzing.targets import Target, discover
from tests.benchmarks.outcomes import Plan, chat
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.processes.ports import free_port
from tests.support.processes.processes import Sampler, kind_of
from tests.support.processes.simulated_suite import SimulatedSuite

_AT_ONCE = 16
_CANARY_PAUSE_S = 0.25
_CANARY_GUARD_S = 20.0
_ROUND = 100
"""Examples of one round of Hypothesis; it ends between two of them."""
_SHOWN = 20
_JUDGED_S = 300
"""Memory is judged in runs this long: what a process needs for odd messages comes by and by."""
_REMEMBERED = 40


class _ProblemError(Exception):
    """Tells Hypothesis that a call came to what may not be."""


@dataclass
class Fuzz:
    """One run."""

    suite: SimulatedSuite
    targets: list[Target]
    arguments: argparse.Namespace
    verdict: Verdict = field(default_factory=Verdict)
    codes: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    problems: Counter[str] = field(default_factory=Counter)
    latest: deque[Script] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    canaries: int = 0
    examples: int = 0
    """Calls that Hypothesis made."""
    channels: dict[str, Any] = field(default_factory=dict)
    ends_at: float = 0.0

    def over(self) -> bool:
        return time.monotonic() >= self.ends_at

    async def play(self, script: Script) -> str:
        """Make a call; answers the problem, if there is one."""
        target = self._target(script)
        self.latest.append(script)
        outcome = await play(script, target, self.channels[script.server])
        self.codes[f"{script.server} {script.path}"][outcome.code] += 1
        if not self.suite.services[script.server.partition("/")[0]].alive:
            return f"{script.server} is dead"
        return outcome.problem

    def _target(self, script: Script) -> Target:
        return next(t for t in self.targets if (t.server, t.path) == (script.server, script.path))

    def found(self, script: Script, problem: str) -> None:
        """Keep a problem and print the call, the first few times for each kind."""
        kind = f"{script.path}: {kind_of(problem[:200])}"
        self.problems[kind] += 1
        if self.problems[kind] <= 2:
            progress(f"{problem}\n{script.to_json()}")

    # ---- the sources -----------------------------------------------------------------------------

    async def by_chance(self, numbers: Any) -> None:
        """Make calls from seeded chance until time is up."""
        for number in numbers:
            if self.over():
                return
            script = make_script(random.Random(f"{self.arguments.seed}/{number}"), self.targets)
            if problem := await self.play(script):
                self.found(script, problem)

    def by_hypothesis(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make calls from Hypothesis, in a thread, until time is up."""
        turn = 0
        while not self.over():
            turn += 1
            if failing := self._round(loop, self.arguments.seed * 1_000_003 + turn):
                self.found(*failing[-1])  # the last one is the smallest

    def _round(self, loop: asyncio.AbstractEventLoop, seed: int) -> list[tuple[Script, str]]:
        """Try some examples; answers those that failed, shrunk further and further."""
        failing: list[tuple[Script, str]] = []

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=_ROUND,
            deadline=None,
            database=None,
            print_blob=False,
            verbosity=hypothesis.Verbosity.quiet,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(st.randoms(use_true_random=False))
        def example(chance: random.Random) -> None:
            if self.over():
                return
            script = make_script(chance, self.targets)
            self.examples += 1
            problem = asyncio.run_coroutine_threadsafe(self.play(script), loop).result()
            if problem:
                failing.append((script, problem))
                raise _ProblemError(problem)

        # Flaky: it failed once and not again. It is told all the same.
        with contextlib.suppress(_ProblemError, Flaky):
            example()
        return failing

    async def canary(self) -> None:
        """Chat as clients do, beside it all."""
        while not self.over():
            for model, stub in self._canary_stubs():
                outcome = await chat(stub, Plan.FINISH, 5, guard_s=_CANARY_GUARD_S, model=model)
                self.canaries += 1
                if outcome.code != "OK" or outcome.wrong:
                    self.verdict.broken.append(
                        f"canary of {model}: {outcome.label} {outcome.message} {outcome.wrong}"
                    )
                    progress("the canary fell; the latest calls were:")
                    progress("\n".join(script.to_json() for script in self.latest))
            await asyncio.sleep(_CANARY_PAUSE_S)

    def _canary_stubs(self) -> list[tuple[str, Any]]:
        stub = processor_pb2_grpc.ProcessorServiceStub(self.channels["canary"])
        return [(model, stub) for model in self.suite.models]

    # ---- the whole -------------------------------------------------------------------------------

    async def run(self, replay: Sequence[Script]) -> Verdict:
        """Fuzz, calm down, check."""
        suite, verdict = self.suite, self.verdict
        await suite.until_connected()
        before = suite.footprints()
        sampler = Sampler(
            {n: lambda s=s: s.pid for n, s in suite.services.items()}  # type: ignore[misc]
        )
        addresses = {t.server: t.address for t in self.targets}
        addresses["canary"] = suite.services["processor"].address
        self.channels = {
            name: grpc.aio.insecure_channel(
                address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
            for name, address in addresses.items()
        }
        async with sampler.running():
            await (self._replay(replay) if replay else self._fuzz())
        for channel in self.channels.values():
            await channel.close(None)
        for name, service in suite.services.items():
            verdict.expect(service.alive and service.pid, f"{name} died")
        await suite.expect_idle(verdict)
        await suite.expect_no_leak(verdict, before)
        await suite.stop(verdict)
        suite.expect_no_complaints(verdict)
        self._judge_memory(sampler)
        self._report()
        return verdict

    def _judge_memory(self, sampler: Sampler) -> None:
        memory = self.verdict.measured["memory"] = {}
        for name in self.suite.services:
            if (growth := sampler.growth(name)) is None:
                continue
            memory[name] = asdict(growth)
            if self.arguments.seconds >= _JUDGED_S:
                self.verdict.expect(growth.flat, f"memory of {name} grows: {growth}")

    async def _fuzz(self) -> None:
        self.ends_at = time.monotonic() + self.arguments.seconds
        numbers = iter(range(10**12))
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            self.canary(),
            asyncio.to_thread(self.by_hypothesis, loop),
            *(self.by_chance(numbers) for _ in range(_AT_ONCE)),
        )

    async def _replay(self, scripts: Sequence[Script]) -> None:
        for script in scripts:
            problem = await self.play(script)
            progress(f"{script.path}: {problem or 'nothing wrong'}")
            if problem:
                self.found(script, problem)

    def _report(self) -> None:
        verdict = self.verdict
        calls = sum(counter.total() for counter in self.codes.values())
        verdict.measured |= {
            "seed": self.arguments.seed,
            "calls": calls,
            "by_hypothesis": self.examples,
            "canaries": self.canaries,
            "methods": {name: dict(c.most_common()) for name, c in sorted(self.codes.items())},
        }
        verdict.broken += [f"{n} x {kind}" for kind, n in self.problems.most_common(_SHOWN)]


def _suite(folder: Path) -> SimulatedSuite:
    """Put every service there is behind one Processor: a worker for one model, a pair for another.

    The encode, the embedding and the diffusion workers serve nobody but the fuzz. The process whose
    admin address is fuzzed too is a worker of its own, which serves nobody: a log level that is set
    there must not hide complaints.
    """
    suite = SimulatedSuite(folder, {"handoff_wait_s": 1.0, "simulated_step_s": 0.001})
    suite.add_worker("worker")
    suite.add_pair("pair")
    suite.add_processor("processor")
    suite.add_worker("administered", model="nobody's", admin_listen=f"127.0.0.1:{free_port()}")
    del suite.models["nobody's"]
    suite.add_encode_worker("encode")
    suite.add_embedding_worker("embedding")
    suite.add_diffusion_worker("images")
    suite.add_diffusion_worker("videos", kind="video")
    return suite


def _targets(suite: SimulatedSuite, only: str, skip: str) -> list[Target]:
    """Find all methods; of the administered process those of its admin address."""
    targets: list[Target] = []
    for name, service in suite.services.items():
        admin = service.flags.get("admin_listen")
        if admin is None:
            targets += discover(name, service.address)
            continue
        try:
            targets += discover(f"{name}/admin", str(admin))
        except grpc.RpcError:
            progress("the admin address doesn't answer reflection; it isn't fuzzed")
    found = [t for t in targets if only in t.path and not (skip and skip in t.path)]
    assert found, "no method is left to fuzz"
    return found


def run(arguments: argparse.Namespace) -> Verdict:
    """Start the suite, fuzz it."""
    replay = []
    if arguments.replay:
        replay = [Script.from_json(line) for line in arguments.replay.read_text().splitlines()]
    with folder_for(arguments) as folder:
        suite = _suite(folder)
        with suite.running():
            targets = _targets(suite, arguments.only, arguments.skip)
            verdict: Verdict = uvloop.run(Fuzz(suite, targets, arguments).run(replay))
        return verdict


def main() -> int:
    """Parse arguments, fuzz, report."""
    parser = parser_of("fuzz", __doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long (600)")
    parser.add_argument("--seed", type=int, default=1, help="another one makes other calls (1)")
    parser.add_argument("--only", default="", help="only methods whose path contains this")
    parser.add_argument("--skip", default="", help="no methods whose path contains this")
    parser.add_argument("--replay", type=Path, help="file of failing calls to make again, as JSON")
    arguments = parser.parse_args()
    return run(arguments).conclude(as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
