"""A simulated run: a suite, requests, faults, and what must hold of each request and at the end.

Everything in a run follows from its `Scenario`, and a scenario from a seed. The simulated engine's
answers can be worked out by hand, so each is checked token by token.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

from google.rpc import error_details_pb2, status_pb2

from millstream.v1 import processor_pb2
from millstream_server.control.engine import Role
from millstream_server.processor.text.detokenizer import detokenizer
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import Code
from millstream_testing.alphabet import VOCAB_SIZE
from tests.support.simulation.clock import NothingLeftError, SimulatedLoop, run
from tests.support.simulation.faults import Faults
from tests.support.simulation.network import Link, Network, Pipe
from tests.support.simulation.nodes import MODEL, ProcessorNode, WorkerNode
from tests.support.simulation.rpc import HalfClose, SimulatedCall, Status, serve

_COMPLETE = "/millstream.v1.ProcessorService/Complete"
_READY_S = 5.0
_LONGEST_S = 300.0
"""After the last fault, of a request."""
_SETTLE_S = 150.0
"""After the last request and fault: longer than any limit that gives things back."""
_OURS = frozenset({Code.INTERNAL, Code.UNKNOWN, Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED})
"""No fault explains these."""


@dataclass(frozen=True)
class Request:
    """One request, and how its client behaves."""

    at_s: float
    prompt: tuple[int, ...]
    tokens: int
    n: int = 1
    cancel_after_s: float | None = None
    deadline_s: float | None = None
    read_pause_s: float = 0.0
    """A slow reader waits so long after each message."""

    def expected(self) -> list[int]:
        first = self.prompt[-1] + 1
        return [token % VOCAB_SIZE for token in range(first, first + self.tokens)]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, or is done by an operator."""

    at_s: float
    kind: str
    """A method of `_Faults`."""
    target: int
    """Which node, or which pair, modulo how many there are."""
    lasts_s: float = 1.0


@dataclass(frozen=True)
class Scenario:
    """What happens in a run."""

    seed: int
    workers: tuple[Role, ...]
    step_s: float
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]


@dataclass
class Answer:
    """What one client got."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)
    started: int = 0
    finished: list[processor_pb2.TurnFinished] = field(default_factory=list)
    ends: list[Status] = field(default_factory=list)
    late: int = 0
    """Messages after the last."""

    def take(self, message: processor_pb2.CompleteResponse) -> None:
        self.late += bool(self.finished)
        self.started += message.HasField("started")
        for delta in message.choices:
            self.late += delta.index in self.reasons
            self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
            if delta.finish_reason:
                self.reasons[delta.index] = delta.finish_reason
        if message.HasField("finished"):
            self.finished.append(message.finished)


@dataclass
class Result:
    """What came of a run."""

    scenario: Scenario
    answers: list[Answer]
    wrong: list[str] = field(default_factory=list)
    """Promises that were broken."""
    seen: list[tuple[float, int, int]] = field(default_factory=list)
    """When each message came, to which request, with how many bytes: equal in equal runs."""

    @property
    def ends(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for answer in self.answers:
            for end in answer.ends:
                found[end.code.name] = found.get(end.code.name, 0) + 1
        return found


def play(scenario: Scenario, text: TextModel) -> Result:
    """Run a scenario; the same one always gives the same result."""
    chance = random.Random(scenario.seed)
    network = Network(chance)
    loop = SimulatedLoop(network)
    network.loop = loop
    suite = Suite(scenario, loop, network, text)
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
        self.result = Result(scenario, [Answer(request) for request in scenario.requests])
        self._text = text
        self._workers: dict[str, WorkerNode] = {}
        self.stopping: set[str] = set()
        """Workers that drain."""

    async def run(self) -> None:
        self.processor = ProcessorNode(
            "processor", self.loop, self.network, self._text, self._workers.get
        )
        self.processor.spawn(self.processor.run)
        for index in range(len(self.scenario.workers)):
            self.start(index)
        self.announce()
        await asyncio.sleep(_READY_S)
        faults = Faults(self)
        playing = [asyncio.ensure_future(faults.play(fault)) for fault in self.scenario.faults]
        clients = [
            asyncio.ensure_future(self._client(number, answer))
            for number, answer in enumerate(self.result.answers)
        ]
        await asyncio.gather(*playing)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_S):
                await asyncio.gather(*clients)  # which cancels those that hang
        await asyncio.sleep(_SETTLE_S)
        self._check()
        for node in (self.processor, *self._workers.values()):
            await node.kill()

    def unexpected(self, context: dict[str, Any]) -> None:
        """Take an exception that nobody awaits, but a cancel's: asyncio trips over killed ones."""
        if not isinstance(context.get("exception"), asyncio.CancelledError):
            self.result.wrong.append(f"nobody took {context}")

    # ---- workers

    def name(self, index: int) -> str:
        return f"worker-{index}"

    def start(self, index: int) -> None:
        """Start a worker, with a new identity."""
        role = self.scenario.workers[index]
        worker = WorkerNode(
            self.name(index), role, self.loop, step_s=self.scenario.step_s, transfer_timeout_s=5.0
        )
        self._workers[worker.name] = worker
        worker.spawn(worker.run)

    def announce(self, *without: str) -> None:
        names = [self.name(i) for i in range(len(self.scenario.workers))]
        self.processor.found.set([name for name in names if name not in without])

    def worker(self, index: int) -> WorkerNode | None:
        return self._workers.get(self.name(index))

    async def end(self, index: int, *, silently: bool) -> None:
        worker = self._workers.pop(self.name(index), None)
        if worker is not None:
            self.network.end(worker.name, silently=silently)
            await worker.kill()

    # ---- clients

    async def _client(self, number: int, answer: Answer) -> None:
        request = answer.request
        await asyncio.sleep(request.at_s)
        options = processor_pb2.GenerationOptions(return_token_ids=True)
        options.sampling.max_new_tokens = request.tokens
        options.sampling.temperature = 0
        if request.n > 1:
            options.n = request.n
        message = processor_pb2.CompleteRequest(model=MODEL, options=options)
        message.token_ids.ids.extend(request.prompt)
        link = Link(self.network, "client", "processor")
        up, down = Pipe(link.to_server), Pipe(link.to_client)
        deadline_s = None if request.deadline_s is None else self.loop.time() + request.deadline_s
        call = SimulatedCall(_COMPLETE, up, down, "ipv4:10.1.0.1:40000", deadline_s)
        self.processor.context.run(serve, self.processor.methods, _COMPLETE, call)
        up.tell(message.SerializeToString())
        up.tell(HalfClose)
        limits = [s for s in (request.cancel_after_s, request.deadline_s) if s is not None]
        try:
            async with asyncio.timeout(min(limits, default=None)):
                while not isinstance(item := await down.get(), Status):
                    self.result.seen.append((self.loop.now_s, number, len(item)))
                    answer.take(processor_pb2.CompleteResponse.FromString(item))
                    if request.read_pause_s:
                        await asyncio.sleep(request.read_pause_s)
                answer.ends.append(item)
        except TimeoutError:  # gRPC ends it at the client, too
            answer.ends.append(Status(Code.CANCELLED))
            call.leave()
        link.break_()

    # ---- what must hold

    def _check(self) -> None:
        for number, answer in enumerate(self.result.answers):
            for what in _wrong(answer, self._text, faults=bool(self.scenario.faults)):
                self.result.wrong.append(f"request {number}: {what}")
        nodes: list[ProcessorNode | WorkerNode] = [self.processor, *self._workers.values()]
        for node in nodes:
            for what, count in node.used.items():
                if count:
                    self.result.wrong.append(f"{node.name} still has {count} {what}")


def _wrong(answer: Answer, text: TextModel, *, faults: bool) -> list[str]:
    """Return which promises a request's answer breaks."""
    if len(answer.ends) != 1:
        return [f"it ended {len(answer.ends)} times"]
    (end,), request = answer.ends, answer.request
    ours = request.cancel_after_s is not None or request.deadline_s is not None
    found = [f"{answer.late} things came after an end"] if answer.late else []
    found += _wrong_output(answer, text)
    if end.code is Code.OK:
        found += _wrong_end(answer, cut=ours)
    elif answer.finished and not ours:  # a client may cancel between the turn's end and the status
        found.append(f"a finished turn ended with {end.code.name}")
    elif end.code in _OURS or (not faults and not ours):
        found.append(f"{end.code.name} {_reason(end)}: {end.message}")
    return found


def _wrong_output(answer: Answer, text: TextModel) -> list[str]:
    """Compare tokens and text with what they must be; they may be cut."""
    found: list[str] = []
    whole = answer.request.expected()
    for index, tokens in answer.tokens.items():
        if tokens != whole[: len(tokens)]:
            found.append(f"choice {index} has {tokens}, not {whole[: len(tokens)]}")
        reader = detokenizer(text, skip_special_tokens=True, continuation=True)
        said = reader.push(tokens) + (reader.flush() if index in answer.reasons else "")
        if answer.texts[index] != said:
            found.append(f"choice {index} says {answer.texts[index]!r}, not {said!r}")
    return found


def _wrong_end(answer: Answer, *, cut: bool) -> list[str]:
    """Check an OK answer; with ``cut`` its client may have ended it early."""
    counts = [len(answer.tokens.get(index, ())) for index in range(answer.request.n)]
    if (answer.started, len(answer.finished)) != (1, 1):
        return [f"{answer.started} starts and {len(answer.finished)} ends in an OK answer"]
    found: list[str] = []
    if not cut and counts != [answer.request.tokens] * answer.request.n:
        found.append(f"an OK answer has {counts} tokens")
    if (used := answer.finished[0].usage.completion_tokens) != sum(counts):
        found.append(f"{used} tokens were counted, {sum(counts)} came")
    return found


def _reason(end: Status) -> str:
    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(end.details or b"").details:
        if detail.Unpack(info):
            return str(info.reason)
    return ""
