"""A simulated run: a suite, requests, faults, and what must hold of each request and at the end.

Everything in a run follows from its `Scenario`, and a scenario from a seed. The engine's answers
can be worked out by hand (`engine.py`), so each is checked token by token.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.processor.admission import QueueLimits
from millstream_server.processor.text.tokenizer import TextModel
from tests.support.simulation.checks import wrong_talk
from tests.support.simulation.clients import Clients, Talk
from tests.support.simulation.clock import NothingLeftError, SimulatedLoop, run
from tests.support.simulation.engine import Machine
from tests.support.simulation.faults import Faults
from tests.support.simulation.models import text_of
from tests.support.simulation.network import Network
from tests.support.simulation.nodes import ProcessorNode, WorkerNode
from tests.support.simulation.requests import Chat, Completion
from tests.support.simulation.rpc import SimulatedChannel

_READY_S = 5.0
_LONGEST_S = 300.0
"""After the last fault, of a request."""
_SETTLE_S = 150.0
"""After the last request and fault: longer than any limit that gives things back."""
_QUIET_S = 30.0
"""So long nothing must be used before less than that is waited for."""
_TRANSFER_S = 5.0


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, or is done by an operator."""

    at_s: float
    kind: str
    """A method of `Faults`."""
    target: int
    """Which node, or which pair, modulo how many there are."""
    lasts_s: float = 1.0


@dataclass(frozen=True)
class Scenario:
    """What happens in a run."""

    seed: int
    workers: tuple[Role, ...]
    step_s: float
    requests: tuple[Completion | Chat, ...]
    faults: tuple[Fault, ...]
    processors: int = 1
    machine: Machine = field(default_factory=Machine)
    form: str = "hermes"
    """How the model writes reasoning and calls."""
    prefill_first: bool = False
    pacing_s: float = 0.0
    max_running: int = 0
    max_queued: int = 1024
    settles_long: bool = False
    """Whether the whole time is waited for at the end, though nothing is used any more."""


@dataclass
class Result:
    """What came of a run."""

    scenario: Scenario
    talks: list[Talk]
    wrong: list[str] = field(default_factory=list)
    """Promises that were broken."""
    seen: list[tuple[float, int, int]] = field(default_factory=list)
    """When each message came, to which request, with how many bytes: equal in equal runs."""

    @property
    def ends(self) -> Counter[str]:
        return Counter(end.code.name for talk in self.talks for end in talk.ends)

    @property
    def went_on(self) -> Iterator[tuple[Talk, Any]]:
        """Each time that a choice went on at another worker."""
        for talk in self.talks:
            for answer in talk.answers:
                for finished in answer.finished:
                    for done in finished.redispatches:
                        yield talk, done


def play(scenario: Scenario) -> Result:
    """Run a scenario; the same one always gives the same result."""
    chance = random.Random(scenario.seed)
    network = Network(chance)
    loop = SimulatedLoop(network)
    network.loop = loop
    suite = Suite(scenario, loop, network, text_of(scenario.form))
    loop.set_exception_handler(lambda _, context: suite.unexpected(context))
    try:
        run(loop, scenario.seed, suite.run)
    except NothingLeftError:
        suite.result.wrong.append("everything waits for what never happens")
    return suite.result


class Suite:
    """One run."""

    def __init__(
        self, scenario: Scenario, loop: SimulatedLoop, network: Network, text: TextModel
    ) -> None:
        self.scenario = scenario
        self.loop, self.network = loop, network
        self.result = Result(scenario, [Talk(request) for request in scenario.requests])
        self._text = text
        self._workers: dict[str, WorkerNode] = {}
        self._fronts: dict[str, ProcessorNode] = {}
        self._unnamed: frozenset[str] = frozenset()
        self._names = [f"worker-{index}" for index in range(len(scenario.workers))]

    async def run(self) -> None:
        for index in range(self.scenario.processors):
            self.start_front(self.front_name(index))
        for index in range(len(self.scenario.workers)):
            self.start(index)
        await asyncio.sleep(_READY_S)
        faults = Faults(self)
        playing = [asyncio.ensure_future(faults.play(fault)) for fault in self.scenario.faults]
        clients = self._clients()
        talking = [
            asyncio.ensure_future(clients.play(number, talk))
            for number, talk in enumerate(self.result.talks)
        ]
        await asyncio.gather(*playing)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_S):
                await asyncio.gather(*talking)  # which cancels those that hang
        await self._settle()
        self._check()
        for node in self._nodes:
            await node.kill()

    def _clients(self) -> Clients:
        scenario = self.scenario

        def channel(client: str, index: int) -> SimulatedChannel:
            return SimulatedChannel(self.network, client, self.front_name(index), self._fronts.get)

        def ready(index: int) -> bool:
            front = self._fronts.get(self.front_name(index))
            return front is not None and not front.leaving

        return Clients(scenario.form, scenario.processors, channel, ready, self.result.seen)

    async def _settle(self) -> None:
        """Wait until all limits are over that give things back; less if nothing is used."""
        loop, quiet_s = self.loop, 0.0
        until_s = loop.time() + _SETTLE_S
        while loop.time() < until_s and (quiet_s < _QUIET_S or self.scenario.settles_long):
            await asyncio.sleep(1.0)
            quiet_s = 0.0 if any(any(node.used.values()) for node in self._nodes) else quiet_s + 1.0

    def unexpected(self, context: dict[str, Any]) -> None:
        """Take an exception that nobody awaits, but a cancel's: asyncio trips over killed ones."""
        if not isinstance(context.get("exception"), asyncio.CancelledError):
            self.result.wrong.append(f"nobody took {context}")

    # ---- nodes

    @property
    def _nodes(self) -> Sequence[ProcessorNode | WorkerNode]:
        return [*self._fronts.values(), *self._workers.values()]

    def name(self, index: int) -> str:
        return self._names[index]

    def front_name(self, index: int) -> str:
        return f"processor-{index}"

    def start(self, index: int) -> None:
        """Start a worker, with a new identity."""
        scenario = self.scenario
        worker = WorkerNode(
            self.name(index),
            scenario.workers[index],
            self.loop,
            scenario.machine,
            self._text,
            step_s=scenario.step_s,
            handoff_wait_s=_TRANSFER_S,
            prefill_first=scenario.prefill_first,
        )
        self._workers[worker.name] = worker
        worker.spawn(worker.run)

    def replace(self, index: int) -> str:
        """Start a worker beside another, whose name is returned, and let it take its place."""
        old = self._names[index]
        self._names[index] = f"{old}+"
        self.start(index)
        return old

    def start_front(self, name: str) -> None:
        """Start a Processor, which knows nothing of the one before."""
        scenario = self.scenario
        front = ProcessorNode(
            name,
            self.loop,
            self.network,
            self._text,
            self._workers.get,
            form=scenario.form,
            queue=QueueLimits(max_running=scenario.max_running, max_queued=scenario.max_queued),
            pacing_s=scenario.pacing_s,
        )
        self._fronts[name] = front
        front.found.set(self._addresses())
        front.spawn(front.run)

    def announce(self, *without: str) -> None:
        """Let discovery name all workers but these."""
        self._unnamed = frozenset(without)
        for front in self._fronts.values():
            front.found.set(self._addresses())

    def _addresses(self) -> list[str]:
        return [name for name in self._names if name not in self._unnamed]

    def worker(self, index: int) -> WorkerNode | None:
        return self._workers.get(self.name(index))

    def front(self, name: str) -> ProcessorNode | None:
        return self._fronts.get(name)

    async def end(self, index: int, *, silently: bool) -> None:
        await self.end_worker(self.name(index), silently=silently)

    async def end_worker(self, name: str, *, silently: bool) -> None:
        await self._end(self._workers.pop(name, None), silently=silently)

    async def end_front(self, name: str, *, silently: bool) -> None:
        await self._end(self._fronts.pop(name, None), silently=silently)

    async def _end(self, node: ProcessorNode | WorkerNode | None, *, silently: bool) -> None:
        if node is not None:
            self.network.end(node.name, silently=silently)
            await node.kill()

    # ---- what must hold

    def _check(self) -> None:
        wrong = self.result.wrong
        for number, talk in enumerate(self.result.talks):
            wrong += [
                f"request {number}: {what}" for what in wrong_talk(talk, self.scenario, self._text)
            ]
        wrong += self.network.broken
        for node in self._nodes:
            wrong += [f"{node.name} still has {n} {what}" for what, n in node.used.items() if n]
