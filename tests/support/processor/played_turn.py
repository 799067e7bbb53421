"""A `Turn` on workers and with a client that the test plays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from millstream.v1 import processor_pb2
from millstream_server.control.engine import Role, Task, WorkerDescription
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import Ability, Sampling
from millstream_server.generation.ticket import TicketKey
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor.admission import Admission
from millstream_server.processor.answer import Reading
from millstream_server.processor.conversation import Options
from millstream_server.processor.leg import Running, Workers
from millstream_server.processor.output import Pacer
from millstream_server.processor.responses import Messages
from millstream_server.processor.telemetry import FrontTelemetry, TurnTelemetry
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.turn import Turn, TurnParts
from millstream_server.routing.plan import Plan, PlannedLeg
from millstream_server.routing.workers import WorkerView


@dataclass
class RunningRequest:
    cancel: Callable[[], None]

    def abandon(self) -> None:
        self.cancel()


class Played(Workers):
    """Stands where a `Fleet` would; keeps what its workers were asked and where output goes."""

    def __init__(self) -> None:
        self.asked: dict[str, list[GenerationRequest]] = {"prefill": [], "decode": []}
        self.sinks: dict[str, list[OutputSink]] = {"prefill": [], "decode": []}
        self.cancels: list[str] = []

    def generate(self, address: str, request: GenerationRequest, sink: OutputSink) -> Running:
        self.asked.setdefault(address, []).append(request)
        self.sinks.setdefault(address, []).append(sink)
        return RunningRequest(lambda: self.cancels.append(address))


def make_view(address: str, role: Role, *abilities: Ability, **more: Any) -> WorkerView:
    engine = GeneratorInfo(
        engine="simulated",
        engine_version="1",
        max_running_requests=9,
        vocab_size=500,
        context_length=500,
        block_size=1,
        total_blocks=500,
        abilities=frozenset(abilities),
        bootstrap_host="127.0.0.1",
        bootstrap_port=1,
        **more,
    )
    return WorkerView(address, WorkerDescription(role=role, model="m", engine=engine))


KEY = TicketKey(bytes(32))
PREFILL, DECODE = make_view("prefill", Role.PREFILL), make_view("decode", Role.DECODE)
ALONE = Plan((PlannedLeg(Role.AGGREGATED, DECODE),))
PAIR = Plan((PlannedLeg(Role.PREFILL, PREFILL), PlannedLeg(Role.DECODE, DECODE)))


NO_KNOBS: Mapping[str, Any] = {}
DONE = Finish(reason=FinishReason.LENGTH, prompt_tokens=2, completion_tokens=1)


class Admitted:
    """Stands where an `Admission` would."""

    def __init__(self) -> None:
        self.left = 0

    def leave(self) -> None:
        self.left += 1


class Client:
    """Stands where a `Call` would: takes the turn's messages while it reads."""

    def __init__(self, name: str) -> None:
        self.caller_key = name
        self.output: Messages | None = None
        self.reads = True
        self.messages: list[processor_pb2.ChatResponse] = []
        self.raised: BaseException | None = None
        self.failures: list[BaseException] = []
        self._asked = False

    @property
    def texts(self) -> list[str]:
        return [choice.text for message in self.messages for choice in message.choices]

    def ready(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._pull)

    def read(self) -> None:
        """Read again."""
        self.reads = True
        if self._asked:
            asyncio.get_running_loop().call_soon(self._pull)

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.output = None

    def _pull(self) -> None:
        output = self.output
        if output is None or output.over or self.raised:
            return
        if not self.reads:
            output.gathers = True
            return
        self._asked = False
        try:
            message = output.next()
        except Exception as error:  # noqa: BLE001 - as a transport does
            self.raised = error
            return
        if message is not None:
            copy = processor_pb2.ChatResponse()
            copy.CopyFrom(message)
            self.messages.append(copy)

    async def end(self) -> None:
        """Wait for the turn's end."""
        async with asyncio.timeout(5):
            while self.raised is None and self.output and not self.output.over:
                await asyncio.sleep(0)


@dataclass
class Started:
    """A turn on played workers."""

    turn: Turn
    output: Messages
    workers: Played
    admission: Admitted
    client: Client


def make_parts(unread: UnreadOutput | None = None) -> TurnParts:
    return TurnParts(
        pacer=Pacer(0.05),
        workers=Played(),
        ticket_key=KEY,
        unread=unread or UnreadOutput(),
    )


def start_turn(
    text_model: TextModel,
    plan: Plan,
    *,
    telemetry: TurnTelemetry | None = None,
    logprobs: LogprobOptions | None = None,
    admission: Admission | None = None,
    parts: TurnParts | None = None,
    seed: int | None = None,
    temperature: float = 1.0,
    name: str = "client",
    notice: Callable[[], bool] | None = None,
    knobs: Mapping[str, Any] = NO_KNOBS,
    reading: Reading | None = None,
    **options: Any,
) -> Started:
    """Start one on ``plan``; ``options`` are those of a turn."""
    workers, admitted, client = Played(), Admitted(), Client(name)
    request = GenerationRequest(
        request_id="r",
        model="m",
        prompt=Prompt([1, 2]),
        sampling=Sampling(
            **{"max_new_tokens": 9, "seed": seed, "temperature": temperature, **knobs}
        ),
        logprobs=logprobs,
    )
    output = client.output = Messages(processor_pb2.ChatResponse, notice=notice)
    turn = Turn(
        request,
        Options(path="options.", sampling={}, **options),
        text_model,
        admission or cast("Any", admitted),
        replace(parts or make_parts(), workers=workers),
        call=cast("Any", client),
        output=output,
        telemetry=telemetry or TurnTelemetry(FrontTelemetry(), Task.CHAT),
        reading=reading,
    )
    turn.start(plan)
    return Started(turn, output, workers, admitted, client)
