"""Thousands of chats for minutes, some cancelled, some out of time, workers restarted under them.

    python -m tests.benchmarks.soak                              # 2,000 chats for 5 minutes
    python -m tests.benchmarks.soak --chats 200 --seconds 60

The engine is simulated and slow (--step-s), so that two cores carry the chats; `cores` in the
report tells how busy each process was: together they should stay below the machine's.

Each client always has a chat open: 85 % run to their end, 10 % are cancelled (before the first
token, after it, or by message), 5 % have a deadline that passes midway. Every --restart-s seconds a
worker is restarted: in turns by SIGTERM, which must cost no request, and by SIGKILL, which may cost
those that lost a worker before, as ABORTED and REPEATED_LOSS. Clients don't retry. The first worker
is left alone, so that its memory can be judged.

Checked: one terminal status each and no other code; answers right; nothing stuck; memory flat
(judged from --judge-s seconds on); no file, socket or thread left over; no complaint in any log,
ours among them; exit codes 0. How to read the report: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

from tests.benchmarks.outcomes import HIDDEN, MAX_TOKENS, Outcome, Plan, Tally, chat
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.processes.ports import free_port
from tests.support.processes.processes import Sampler
from tests.support.processes.simulated_suite import SimulatedSuite, aggregated, channels_to
from tests.support.processes.suite import ServiceProcess
from tests.support.telemetry.scraping import scrape_now

_WORKERS = 3
_CHATS_PER_CHANNEL = 100
_RAMP_CHATS_PER_S = 200
_GUARD_S = 60.0
_AFTER_KILL_S = 5.0
"""How long after a SIGKILL its losses may still come in: the client lags when it is busy."""
_SHOWN = 10


@dataclass
class Soak:
    """One run's state."""

    suite: SimulatedSuite
    metrics_port: int
    arguments: argparse.Namespace
    verdict: Verdict = field(default_factory=Verdict)
    tally: Tally = field(default_factory=Tally)
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    ends_at: float = 0.0
    kills: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Requests that each SIGKILL cost."""
    terms: int = 0
    open: int = 0
    most_open: int = 0
    unexpected: Counter[str] = field(default_factory=Counter)

    async def client(self, stub: Any, start_at: float) -> None:
        """Hold one chat after the other until time is up."""
        await asyncio.sleep(start_at)
        while time.monotonic() < self.ends_at:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            try:
                outcome = await self._one(stub)
            finally:
                self.open -= 1
            self._judge(outcome)
            if outcome.code == "UNAVAILABLE":
                await asyncio.sleep(self.chance.uniform(0.1, 0.5))

    async def _one(self, stub: Any) -> Outcome:
        draw = self.chance.random()
        if draw < 0.10:
            plans = (Plan.CANCEL_EARLY, Plan.CANCEL_LATE, Plan.CANCEL_TURN)
            plan = self.chance.choice(plans)
        else:
            plan = Plan.DEADLINE if draw < 0.15 else Plan.FINISH
        tokens = self.chance.randint(20, min(60, MAX_TOKENS))
        whole_s = tokens * self.arguments.step_s
        return await chat(
            stub,
            plan,
            tokens,
            guard_s=whole_s * 2 + _GUARD_S,
            deadline_s=whole_s * self.chance.uniform(0.1, 0.8),
            prompt="hi " * self.chance.randint(1, 40),
        )

    def _judge(self, outcome: Outcome) -> None:
        self.tally.add(outcome)
        expected = {
            Plan.DEADLINE: ("OK", "DEADLINE_EXCEEDED"),
            Plan.CANCEL_EARLY: ("CANCELLED",),
            Plan.CANCEL_LATE: ("OK", "CANCELLED"),
        }.get(outcome.plan, ("OK",))
        if outcome.code in expected or outcome.code == HIDDEN:
            return
        since_kill_s = time.monotonic() - self.kills[-1] if self.kills else 1e9
        if outcome.label == "ABORTED REPEATED_LOSS" and since_kill_s < _AFTER_KILL_S:
            self.lost[-1] += 1
            return
        self.unexpected[f"{outcome.plan.value}: {outcome.label}: {outcome.message}"] += 1

    # ---- restarts --------------------------------------------------------------------------------

    async def restarts(self) -> None:
        """Restart all workers but the first in turn, by SIGTERM and by SIGKILL in turn."""
        under_way: list[asyncio.Task[None]] = []
        workers = list(self.suite.workers.items())[1:]
        turn = 0
        try:
            while True:
                await asyncio.sleep(self.arguments.restart_s)
                if time.monotonic() > self.ends_at - 2:
                    break
                await asyncio.gather(*(t for t in under_way if t.get_name() == str(turn % 2)))
                # worker 2 TERM, worker 3 KILL, worker 2 KILL, worker 3 TERM, and again
                kill = turn % 4 in (1, 2)
                name, worker = workers[turn % len(workers)]
                task = asyncio.create_task(self._restart(name, worker, kill=kill))
                task.set_name(str(turn % 2))
                under_way.append(task)
                turn += 1
        finally:
            await asyncio.gather(*under_way)

    async def _restart(self, name: str, worker: ServiceProcess, *, kill: bool) -> None:
        if kill:
            self.kills.append(time.monotonic())
            self.lost.append(0)
            await asyncio.to_thread(worker.kill)
        else:
            self.terms += 1
            worker.terminate()
            code = await worker.until_gone()
            self.verdict.expect(code == 0, f"{name} ended with exit code {code} on SIGTERM")
        worker.start()
        await worker.until_serving()
        progress(f"{name} was restarted by {'SIGKILL' if kill else 'SIGTERM'}")

    # ---- the whole -------------------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Load, restart, calm down, check."""
        loop_complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: loop_complaints.append(str(context.get("message")))
        )
        suite, verdict = self.suite, self.verdict
        await suite.until_connected()
        before = suite.footprints()
        sampler = Sampler(
            {n: lambda s=s: s.pid for n, s in suite.services.items()} | {"client": os.getpid}
        )
        async with sampler.running():
            await self._load()
        cores = sampler.cores()
        await suite.expect_idle(verdict)
        await suite.until_connected()
        await suite.expect_no_leak(verdict, before)
        after = suite.footprints()
        await asyncio.to_thread(self._judge_statuses)
        await suite.stop(verdict)
        suite.expect_no_complaints(verdict)
        verdict.broken += [f"client: {text}" for text in loop_complaints]
        self._report(cores)
        self._judge_memory(sampler)
        verdict.measured["footprints"] = {
            name: {"before": str(before[name]), "after": str(after[name])} for name in before
        }
        return verdict

    async def _load(self) -> None:
        chats = self.arguments.chats
        (processor,) = self.suite.processors.values()
        ramp_s = min(chats / _RAMP_CHATS_PER_S, self.arguments.seconds / 4)
        self.ends_at = time.monotonic() + self.arguments.seconds
        restarts = asyncio.ensure_future(self.restarts())
        async with channels_to(processor, -(-chats // _CHATS_PER_CHANNEL)) as stubs:
            clients = [
                asyncio.ensure_future(self.client(stubs[i % len(stubs)], i / chats * ramp_s))
                for i in range(chats)
            ]
            longest_s = 60 * self.arguments.step_s * 2 + _GUARD_S
            _, stuck = await asyncio.wait(clients, timeout=self.arguments.seconds + longest_s + 30)
            self.verdict.expect(not stuck, f"{len(stuck)} clients are stuck")
            for task in stuck:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            for task in clients:
                if not task.cancelled() and (error := task.exception()):
                    self.verdict.broken.append(f"client: {error!r}")
        await restarts

    def _report(self, cores: dict[str, float]) -> None:
        verdict, tally = self.verdict, self.tally
        verdict.measured |= {
            "chats_at_once": self.most_open,
            "requests": tally.total,
            "statuses": dict(tally.labels.most_common()),
            "plans": dict(tally.plans.most_common()),
            "restarts_by_sigterm": self.terms,
            "restarts_by_sigkill": len(self.kills),
            "requests_lost_by_each_sigkill": self.lost,
            "cores": cores,
        }
        verdict.broken += [f"wrong: {text}" for text in tally.wrong[:_SHOWN]]
        found = self.unexpected.most_common(_SHOWN)
        verdict.broken += [f"unexpected, {count} x {text}" for text, count in found]
        stuck = tally.labels["STUCK"]
        verdict.expect(not stuck, f"{stuck} requests had no status in time")

    def _judge_statuses(self) -> None:
        """See what the Processor itself says it answered: no status hides from its metrics."""
        family = scrape_now(self.metrics_port).families["rpc_server_call_duration_seconds"]
        said: Counter[str] = Counter()
        for sample in family.samples:
            if sample.name.endswith("_count"):
                said[sample.labels["rpc_response_status_code"]] += int(sample.value)
        self.verdict.measured["statuses_by_the_processor"] = dict(said.most_common())
        self.verdict.expect(bool(said), "the Processor counted no RPC")
        allowed = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE"}
        for code in said.keys() - allowed:
            self.verdict.broken.append(f"the Processor answered {said[code]} x {code}")

    def _judge_memory(self, sampler: Sampler) -> None:
        judged = {*self.suite.processors, next(iter(self.suite.workers))}
        memory = self.verdict.measured["memory"] = {}
        for name in (*self.suite.services, "client"):
            growth = sampler.growth(name)
            if growth is None:
                continue
            memory[name] = asdict(growth)
            if name in judged and self.arguments.seconds >= self.arguments.judge_s:
                self.verdict.expect(growth.flat, f"memory of {name} grows: {growth}")


def run(arguments: argparse.Namespace) -> Verdict:
    """Start the suite, soak it."""
    with folder_for(arguments) as folder:
        suite = aggregated(
            folder, workers=_WORKERS, processors=1, simulated_step_s=arguments.step_s
        )
        metrics_port = free_port()
        (processor,) = suite.processors.values()
        processor.flags = {**processor.flags, "metrics_listen": f"127.0.0.1:{metrics_port}"}
        with suite.running():
            verdict: Verdict = uvloop.run(Soak(suite, metrics_port, arguments).run())
        return verdict


def main() -> int:
    """Parse arguments, soak, report."""
    parser = parser_of("soak", __doc__)
    parser.add_argument("--chats", type=int, default=2000, help="chats at once (2000)")
    parser.add_argument("--seconds", type=float, default=300, help="how long (300)")
    parser.add_argument("--step-s", type=float, default=0.25, help="time of an engine step (0.25)")
    parser.add_argument("--restart-s", type=float, default=20, help="between two restarts (20)")
    parser.add_argument(
        "--judge-s", type=float, default=120, help="memory is judged in runs this long (120)"
    )
    arguments = parser.parse_args()
    return run(arguments).conclude(as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
