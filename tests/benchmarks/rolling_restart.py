"""A rolling restart of every process under load: what does it cost a well-configured client?

    python -m tests.benchmarks.rolling_restart                        # 2 Processors, 3 workers
    python -m tests.benchmarks.rolling_restart --topology pair        # 2 + 2 prefill + 2 decode
    python -m tests.benchmarks.rolling_restart --rounds 5 --chats 200 --json
    python -m tests.benchmarks.rolling_restart --topology all --client both --long 20 \\
        --requests 100000 --step-s 0.02                               # 2 + 2 + 2 + 2, ten minutes
    python -m tests.benchmarks.rolling_restart --topology all --client millstream --long 20 --kill

Every process in turn gets SIGTERM while the chats go on; when it has ended (exit code 0) it is
started again, and the next one's turn comes when it serves, is connected to its peers and, for a
Processor, has clients again. The client is any gRPC client with the service config we recommend,
one channel over both Processors; with --client millstream it is our own library, with --client http
kept connections of Python's http.client, of which one in a thousand may lose a request: nothing
tells it that an idle one ends. With --long some
streams of 400 tokens are always open: at the limit of its drain, which is 2 s then, a worker hands
them over. With --kill it is SIGKILL: requests go on at other workers, and those of a Processor if
the client is our library. Wanted: not a single request that isn't OK with the right answer.
Whatever else there is gets printed with its code and details.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

from millstream.v1 import generation_pb2, processor_pb2_grpc
from millstream_client import Client, MillstreamError, service_config
from millstream_testing.waiting import until
from tests.benchmarks.outcomes import Outcome, Plan, Tally, chat
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.processes.processes import clients_of
from tests.support.processes.simulated_suite import ALPHABET, MODEL, VOCAB_SIZE, SimulatedSuite
from tests.support.processes.suite import ServiceProcess
from tests.support.processor.chats import completion, gather, options
from tests.support.wire.failures import failure

_GUARD_S = 60.0
_MOST_THREADS = 1000
_SHOWN = 20
_LONG_TOKENS = 400
_LONG_PROMPTS = ([42], list(range(30, 43)))
"""The first is too short for a hand-off of --topology all."""
_LONG_ANSWER = [(43 + i) % VOCAB_SIZE for i in range(_LONG_TOKENS)]
_CUT = 3
"""The exit code of a process with requests open at the limit of its drain."""
_WORKERS_DRAIN_S = 2
"""With long streams, which take longer."""


@dataclass(frozen=True)
class Caller:
    """A client; each method says how a request went."""

    ask: Callable[[int], Awaitable[Outcome]]
    """Chats, for so many tokens."""
    complete: Callable[[list[int]], Awaitable[Outcome]]
    """Asks for a long completion of a prompt."""
    connections: Callable[[], int] = lambda: 0
    """How many it has opened, if it says."""


@contextlib.asynccontextmanager
async def any_client(addresses: Sequence[str]) -> AsyncIterator[list[Caller]]:
    """Use plain gRPC with nothing but the recommended service config."""
    config = service_config.to_json(service_config.RECOMMENDED)
    channel = grpc.aio.insecure_channel(
        "ipv4:" + ",".join(addresses), options=[("grpc.service_config", config)]
    )
    opts = options(_LONG_TOKENS, ignore_eos=True, return_token_ids=True)
    async with channel:
        stub: Any = processor_pb2_grpc.ProcessorServiceStub(channel)

        async def complete(prompt: list[int]) -> Outcome:
            request = completion(prompt, opts)
            try:
                answer = await gather(stub.Complete(request, timeout=_GUARD_S))
            except grpc.aio.AioRpcError as error:
                told = failure(error)
                return Outcome(Plan.FINISH, told.code.name, told.reason, told.message)
            return _long_outcome(answer.choices[0].token_ids)

        yield [Caller(lambda tokens: chat(stub, Plan.FINISH, tokens, guard_s=_GUARD_S), complete)]


@contextlib.asynccontextmanager
async def our_client(addresses: Sequence[str]) -> AsyncIterator[list[Caller]]:
    """Use the client library."""
    async with Client(",".join(addresses)) as client:

        async def ask(tokens: int) -> Outcome:
            try:
                async with asyncio.timeout(_GUARD_S):
                    answer = await client.chat("hi", max_new_tokens=tokens, model=MODEL).answer()
            except (TimeoutError, MillstreamError) as error:
                return _failed(error)
            # A text that goes on is tokenized anew: what follows is right, but not the same.
            sure = answer.resumed_after[0] if answer.resumed_after else tokens
            got = (answer.text[:sure], answer.usage.completion_tokens, answer.finish_reason)
            right = (ALPHABET[:sure], tokens, generation_pb2.FINISH_REASON_LENGTH)
            wrong = "" if got == right else f"said {answer.text!r}: {got}"
            return Outcome(Plan.FINISH, "OK", wrong=wrong)

        async def complete(prompt: list[int]) -> Outcome:
            knobs: Any = {"ignore_eos": True, "return_token_ids": True, "model": MODEL}
            try:
                async with asyncio.timeout(_GUARD_S):
                    answer = await client.complete(
                        prompt, max_new_tokens=_LONG_TOKENS, **knobs
                    ).answer()
            except (TimeoutError, MillstreamError) as error:
                return _failed(error)
            return _long_outcome(answer.choices[0].token_ids)

        yield [Caller(ask, complete)]


@contextlib.asynccontextmanager
async def both_clients(addresses: Sequence[str]) -> AsyncIterator[list[Caller]]:
    """Use both, in turns."""
    async with any_client(addresses) as one, our_client(addresses) as other:
        yield one + other


def _failed(error: TimeoutError | MillstreamError) -> Outcome:
    if isinstance(error, MillstreamError):
        return Outcome(Plan.FINISH, error.code.name, error.reason, error.message)
    return Outcome(Plan.FINISH, "STUCK", message=f"no end after {_GUARD_S} s")


def _long_outcome(token_ids: Sequence[int]) -> Outcome:
    right = list(token_ids) == _LONG_ANSWER
    wrong = "" if right else f"{len(token_ids)} tokens, not the {_LONG_TOKENS} expected"
    return Outcome(Plan.FINISH, "OK", wrong=wrong)


class KeptConnections:
    """Connections of a client that looks at none of them before it sends; it never retries."""

    LOST = "LOST"
    """The code of a request whose connection broke; no server said anything."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = itertools.cycle(addresses)
        self._free: list[http.client.HTTPConnection] = []
        self.opened = 0

    def ask(self, tokens: int) -> Outcome:
        """Chat; every other answer comes in events, whose head is long gone at its end."""
        kept = self._free.pop() if self._free else self._new()
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "stream": bool(tokens % 2),
        }
        while kept.sock is None:
            try:
                kept.connect()
                self.opened += 1
            except ConnectionRefusedError:
                time.sleep(0.01)
                kept = self._new()
        try:
            headers = {"content-type": "application/json"}
            kept.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
            response = kept.getresponse()
            body = response.read()
        except (http.client.HTTPException, OSError) as error:
            kept.close()
            return Outcome(Plan.FINISH, self.LOST, message=f"{tokens} tokens: {error!r}")
        self._free.append(kept)
        if response.status != http.HTTPStatus.OK:
            return Outcome(Plan.FINISH, f"HTTP {response.status}", message=body.decode()[:200])
        text = _text_of_events(body) if asked["stream"] else _text_of(json.loads(body), "message")
        wrong = "" if text == ALPHABET[:tokens] else f"said {text!r}, not {tokens} tokens"
        return Outcome(Plan.FINISH, "OK", wrong=wrong)

    def _new(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(next(self._addresses), timeout=_GUARD_S)


def _text_of_events(body: bytes) -> str:
    events = [line.removeprefix(b"data: ") for line in body.splitlines() if line]
    assert events.pop() == b"[DONE]", body
    return "".join(_text_of(json.loads(event), "delta") for event in events)


def _text_of(said: Any, part: str) -> str:
    return "".join(choice[part].get("content") or "" for choice in said["choices"])


@contextlib.asynccontextmanager
async def http_client(addresses: Sequence[str]) -> AsyncIterator[list[Caller]]:
    """Use the standard library's HTTP client, as many connections as there are chats."""
    kept, loop = KeptConnections(addresses), asyncio.get_running_loop()
    with ThreadPoolExecutor(_MOST_THREADS) as threads:

        async def ask(tokens: int) -> Outcome:
            return await loop.run_in_executor(threads, kept.ask, tokens)

        async def complete(prompt: list[int]) -> Outcome:
            return await ask(len(prompt))

        yield [Caller(ask, complete, lambda: kept.opened)]


_CLIENTS = {"grpc": any_client, "millstream": our_client, "both": both_clients, "http": http_client}


@dataclass
class Rolling:
    """One run."""

    suite: SimulatedSuite
    arguments: argparse.Namespace
    verdict: Verdict = field(default_factory=Verdict)
    tally: Tally = field(default_factory=Tally)
    long_streams: int = 0
    limits: Counter[str] = field(default_factory=Counter)
    """Processes whose drain came to its limit with requests open, and how often."""
    failed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Requests whose connection broke, of a client that is told nothing before."""
    connections: int = 0
    """That such a client has opened."""
    during: Counter[str] = field(default_factory=Counter)
    """Requests that ended while this process was being restarted."""
    slowest_s: float = 0.0
    restarting: str = "none"
    over: bool = False

    async def client(self, caller: Caller, chance: random.Random) -> None:
        """Hold one chat after the other until the last restart is over."""
        while not self.over:
            tokens = chance.randint(1, self.arguments.tokens)
            began = time.monotonic()
            outcome = await caller.ask(tokens)
            self.slowest_s = max(
                self.slowest_s, time.monotonic() - began - tokens * self.arguments.step_s
            )
            self._judge(outcome)

    async def long_client(self, caller: Caller, prompt: list[int]) -> None:
        """Hold one long stream after the other."""
        while not self.over:
            self._judge(await caller.complete(prompt))
            self.long_streams += 1

    def _judge(self, outcome: Outcome) -> None:
        self.tally.add(outcome)
        self.during[self.restarting] += 1
        if outcome.code == KeptConnections.LOST:
            self.lost.append(f"restarting {self.restarting}: {outcome.message}")
        elif outcome.code != "OK":
            self.failed.append(f"restarting {self.restarting}: {outcome.label}: {outcome.message}")

    async def _restart(self, name: str, service: ServiceProcess) -> float:
        """Restart one process; answers how long it was away, in seconds."""
        self.restarting = name
        # Kept connections stay where they were opened, until that is restarted.
        clients = 0 if self.arguments.client == "http" else clients_of(service.port)
        if self.arguments.kill:  # a request that loses two workers is stopped, as it should be
            longest = _LONG_TOKENS if self.arguments.long else self.arguments.tokens
            await asyncio.sleep(longest * self.arguments.step_s)
        began = time.monotonic()
        if self.arguments.kill:
            await asyncio.to_thread(service.kill)
        else:
            await self._drain(name, service)
        service.start()
        await service.until_serving()
        await self.suite.until_connected()
        await until(lambda: clients_of(service.port) >= clients, 60)
        away_s = time.monotonic() - began
        progress(f"{name}: {away_s:.1f} s, {self.tally.total} requests so far")
        return away_s

    async def _drain(self, name: str, service: ServiceProcess) -> None:
        """End a process in good order."""
        service.terminate()
        code = await service.until_gone()
        short = self.arguments.processor_drain_s if name.startswith("processor") else True
        expected = (0, _CUT) if self.arguments.long and short else (0,)
        self.verdict.expect(code in expected, f"{name} ended with exit code {code} on SIGTERM")
        self.limits[name] += code == _CUT

    async def run(self) -> Verdict:
        """Load, restart each, check."""
        suite, verdict = self.suite, self.verdict
        await suite.until_connected()
        addresses = [processor.address for processor in suite.processors.values()]
        restarts: dict[str, float] = {}
        async with _CLIENTS[self.arguments.client](addresses) as callers:
            turns = itertools.cycle(callers)
            clients = [
                asyncio.ensure_future(self.client(next(turns), random.Random(i)))
                for i in range(self.arguments.chats)
            ]
            clients += [
                asyncio.ensure_future(self.long_client(next(turns), _LONG_PROMPTS[i // 2 % 2]))
                for i in range(self.arguments.long)
            ]
            try:
                await until(lambda: self.tally.total >= self.arguments.chats, 60)
                await self._restart_all(restarts)
            finally:
                self.over = True
                await asyncio.gather(*clients)
            self.connections = sum(caller.connections() for caller in callers)
        await suite.expect_idle(verdict)
        await suite.stop(verdict)
        suite.expect_no_complaints(verdict)
        self._report(restarts)
        return verdict

    async def _restart_all(self, restarts: dict[str, float]) -> None:
        for turn in itertools.count(1):
            for name, service in self._restarted():
                restarts[f"{name}, {turn}"] = await self._restart(name, service)
            if turn >= self.arguments.rounds and self.tally.total >= self.arguments.requests:
                return

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
            "long_streams": self.long_streams,
            "drains_at_their_limit": dict(self.limits),
            "statuses": dict(tally.labels.most_common()),
            "restarts": len(restarts),
            "restart_s": restarts,
            "requests_ended_during": dict(self.during),
            "slowest_request_late_by_s": self.slowest_s,
            "connections": self.connections,
            "lost_on_them": self.lost[:_SHOWN],
        }
        verdict.broken += [f"wrong: {text}" for text in tally.wrong[:_SHOWN]]
        verdict.broken += self.failed[:_SHOWN]
        failed = len(self.failed)
        verdict.expect(not failed, f"{failed} of {tally.total} requests failed")
        lost, opened = len(self.lost), self.connections
        verdict.expect(lost <= max(1, opened // 1000), f"{lost} lost on {opened} connections")


def _suite(folder: Path, arguments: argparse.Namespace) -> SimulatedSuite:
    flags: dict[str, object] = {"simulated_step_s": arguments.step_s}
    if arguments.long:
        flags["drain_s"] = _WORKERS_DRAIN_S
    suite = SimulatedSuite(folder, flags)
    if arguments.topology != "aggregated":
        suite.add_pair(prefill=2, decode=2)
    workers = {"aggregated": arguments.workers, "all": 2}.get(arguments.topology, 0)
    for i in range(workers):
        suite.add_worker(f"worker-{i + 1}")
    # Of all kinds of workers: short prompts go to those that do all, longer ones are handed off.
    handoff = {"handoff": "auto", "handoff_min_tokens": 3} if arguments.topology == "all" else {}
    drain = {"drain_s": arguments.processor_drain_s} if arguments.processor_drain_s else {}
    for i in range(2):
        suite.add_processor(f"processor-{i + 1}", **handoff, **drain)
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
        choices=("aggregated", "pair", "all"),
        default="aggregated",
        help="workers that do all, or prefill and decode workers, or two of each (aggregated)",
    )
    parser.add_argument(
        "--client",
        choices=tuple(_CLIENTS),
        default="grpc",
        help="any gRPC client with our service config, our library, half of each, or kept "
        "connections of http.client (grpc)",
    )
    parser.add_argument("--tokens", type=int, default=60, help="of a chat's answer, at most (60)")
    parser.add_argument("--long", type=int, default=0, help="streams of 400 tokens at once (0)")
    parser.add_argument(
        "--processor-drain-s",
        type=float,
        help="a Processor's drain that cuts long streams; with --client millstream they go on",
    )
    parser.add_argument(
        "--requests", type=int, default=0, help="restart all again until so many have ended (0)"
    )
    parser.add_argument("--kill", action="store_true", help="SIGKILL in place of SIGTERM")
    arguments = parser.parse_args()
    if arguments.client == "http" and (arguments.long or arguments.kill):
        parser.error("--client http has no long streams, and goes on after no kill")
    return run(arguments).conclude(as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
