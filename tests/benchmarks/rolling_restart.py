"""A rolling restart of every process under load: what does it cost a well-configured client?

    python -m tests.benchmarks.rolling_restart                        # 2 Processors, 3 workers
    python -m tests.benchmarks.rolling_restart --topology pair        # 2 + 2 prefill + 2 decode
    python -m tests.benchmarks.rolling_restart --rounds 5 --chats 200 --json

Every process in turn gets SIGTERM while the chats go on; when it has ended (exit code 0) it is
started again, and the next one's turn comes when it serves, is connected to its peers and, for a
Processor, has clients again. The client is any gRPC client with the service config we recommend,
one channel over both Processors; with --client millstream it is our own library. Wanted: not a
single request that isn't OK with the right answer. Whatever else there is gets printed with its
code and details.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import uvloop

from millstream.v1 import generation_pb2, processor_pb2_grpc
from millstream_client import Client, MillstreamError, service_config
from millstream_testing.waiting import until
from tests.benchmarks.outcomes import Outcome, Plan, Tally, chat
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.processes.processes import clients_of
from tests.support.processes.simulated_suite import ALPHABET, MODEL, SimulatedSuite, aggregated
from tests.support.processes.suite import ServiceProcess

_GUARD_S = 60.0
_SHOWN = 20
Ask = Callable[[int], Awaitable[Outcome]]
"""Asks for so many tokens; says how it went."""


@contextlib.asynccontextmanager
async def any_client(addresses: Sequence[str]) -> AsyncIterator[Ask]:
    """Use plain gRPC with nothing but the recommended service config."""
    config = service_config.to_json(service_config.RECOMMENDED)
    channel = grpc.aio.insecure_channel(
        "ipv4:" + ",".join(addresses), options=[("grpc.service_config", config)]
    )
    async with channel:
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        yield lambda tokens: chat(stub, Plan.FINISH, tokens, guard_s=_GUARD_S)


@contextlib.asynccontextmanager
async def our_client(addresses: Sequence[str]) -> AsyncIterator[Ask]:
    """Use the client library."""
    async with Client(",".join(addresses)) as client:

        async def ask(tokens: int) -> Outcome:
            try:
                async with asyncio.timeout(_GUARD_S):
                    answer = await client.chat("hi", max_new_tokens=tokens, model=MODEL).answer()
            except TimeoutError:
                return Outcome(Plan.FINISH, "STUCK", message=f"no end after {_GUARD_S} s")
            except MillstreamError as error:
                return Outcome(Plan.FINISH, error.code.name, error.reason, error.message)
            right = (ALPHABET[:tokens], generation_pb2.FINISH_REASON_LENGTH)
            wrong = "" if (answer.text, answer.finish_reason) == right else f"said {answer.text!r}"
            return Outcome(Plan.FINISH, "OK", wrong=wrong)

        yield ask


_CLIENTS = {"grpc": any_client, "millstream": our_client}


@dataclass
class Rolling:
    """One run."""

    suite: SimulatedSuite
    arguments: argparse.Namespace
    verdict: Verdict = field(default_factory=Verdict)
    tally: Tally = field(default_factory=Tally)
    failed: list[str] = field(default_factory=list)
    during: Counter[str] = field(default_factory=Counter)
    """Requests that ended while this process was being restarted."""
    slowest_s: float = 0.0
    restarting: str = "none"
    over: bool = False

    async def client(self, ask: Ask, chance: random.Random) -> None:
        """Hold one chat after the other until the last restart is over."""
        while not self.over:
            tokens = chance.randint(1, 60)
            began = time.monotonic()
            outcome = await ask(tokens)
            self.slowest_s = max(
                self.slowest_s, time.monotonic() - began - tokens * self.arguments.step_s
            )
            self._judge(outcome)

    def _judge(self, outcome: Outcome) -> None:
        self.tally.add(outcome)
        self.during[self.restarting] += 1
        if outcome.code != "OK":
            self.failed.append(f"restarting {self.restarting}: {outcome.label}: {outcome.message}")

    async def _restart(self, name: str, service: ServiceProcess) -> float:
        """Restart one process in good order; answers how long it was away, in seconds."""
        self.restarting = name
        clients = clients_of(service.port)
        began = time.monotonic()
        service.terminate()
        code = await service.until_gone()
        self.verdict.expect(code == 0, f"{name} ended with exit code {code} on SIGTERM")
        service.start()
        await service.until_serving()
        await self.suite.until_connected()
        await until(lambda: clients_of(service.port) >= clients, 60)
        away_s = time.monotonic() - began
        progress(f"{name}: {away_s:.1f} s, {self.tally.total} requests so far")
        return away_s

    async def run(self) -> Verdict:
        """Load, restart each, check."""
        suite, verdict = self.suite, self.verdict
        await suite.until_connected()
        addresses = [processor.address for processor in suite.processors.values()]
        restarts: dict[str, float] = {}
        async with _CLIENTS[self.arguments.client](addresses) as ask:
            clients = [
                asyncio.ensure_future(self.client(ask, random.Random(i)))
                for i in range(self.arguments.chats)
            ]
            try:
                await until(lambda: self.tally.total >= self.arguments.chats, 60)
                for turn in range(self.arguments.rounds):
                    for name, service in self._restarted():
                        restarts[f"{name}, {turn + 1}"] = await self._restart(name, service)
            finally:
                self.over = True
                await asyncio.gather(*clients)
        await suite.expect_idle(verdict)
        await suite.stop(verdict)
        suite.expect_no_complaints(verdict)
        self._report(restarts)
        return verdict

    def _restarted(self) -> list[tuple[str, ServiceProcess]]:
        starts = tuple(self.arguments.restart.split(","))
        return [(n, s) for n, s in self.suite.services.items() if n.startswith(starts)]

    def _report(self, restarts: dict[str, float]) -> None:
        verdict, tally = self.verdict, self.tally
        verdict.measured |= {
            "topology": self.arguments.topology,
            "client": self.arguments.client,
            "chats_at_once": self.arguments.chats,
            "requests": tally.total,
            "statuses": dict(tally.labels.most_common()),
            "restarts": len(restarts),
            "restart_s": restarts,
            "requests_ended_during": dict(self.during),
            "slowest_request_late_by_s": self.slowest_s,
        }
        verdict.broken += [f"wrong: {text}" for text in tally.wrong[:_SHOWN]]
        verdict.broken += self.failed[:_SHOWN]
        failed = len(self.failed)
        verdict.expect(not failed, f"{failed} of {tally.total} requests failed")


def _suite(folder: Path, arguments: argparse.Namespace) -> SimulatedSuite:
    step_s = arguments.step_s
    if arguments.topology == "aggregated":
        workers = arguments.workers
        return aggregated(folder, workers=workers, processors=2, simulated_step_s=step_s)
    suite = SimulatedSuite(folder, {"simulated_step_s": step_s})
    suite.add_pair(prefill=2, decode=2)
    for i in range(2):
        suite.add_processor(f"processor-{i + 1}")
    return suite


def run(arguments: argparse.Namespace) -> Verdict:
    """Start the suite, restart it piece by piece."""
    with folder_for(arguments) as folder:
        suite = _suite(folder, arguments)
        with suite.running():
            verdict: Verdict = uvloop.run(Rolling(suite, arguments).run())
        return verdict


def main() -> int:
    """Parse arguments, restart, report."""
    parser = parser_of("rolling_restart", __doc__)
    parser.add_argument("--chats", type=int, default=150, help="chats at once (150)")
    parser.add_argument("--rounds", type=int, default=1, help="restarts of each process (1)")
    parser.add_argument("--step-s", type=float, default=0.05, help="an engine step's time (0.05)")
    parser.add_argument("--workers", type=int, default=3, help="aggregated workers (3)")
    parser.add_argument(
        "--restart",
        default="prefill,decode,worker,processor",
        help="beginnings of the names of those that are restarted: worker-2,processor (all)",
    )
    parser.add_argument(
        "--topology",
        choices=("aggregated", "pair"),
        default="aggregated",
        help="workers that do all, or prefill and decode workers (aggregated)",
    )
    parser.add_argument(
        "--client",
        choices=tuple(_CLIENTS),
        default="grpc",
        help="any gRPC client with our service config, or our library (grpc)",
    )
    arguments = parser.parse_args()
    return run(arguments).conclude(as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
