"""One chat under load: how it was meant to go, how it went, and whether the two agree."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc

from millstream.v1 import generation_pb2
from tests.support.processes.simulated_suite import ALPHABET, MODEL
from tests.support.processor.chats import CANCEL, Conversation, options, start
from tests.support.wire.failures import failure

MAX_TOKENS = len(ALPHABET)
HIDDEN = "HIDDEN"
"""grpc.aio's client reports INTERNAL "Internal error from Core" in place of the status when the
server ends an RPC just while the client writes or half-closes (grpc/grpc#36066). What the server
said is in the server's own metrics."""
_LENGTH = generation_pb2.FINISH_REASON_LENGTH
_CANCELLED = generation_pb2.FINISH_REASON_CANCELLED


class Plan(enum.Enum):
    """What the client does to a chat."""

    FINISH = "finish"
    CANCEL_EARLY = "cancel before the first token"
    CANCEL_LATE = "cancel after the first token"
    CANCEL_TURN = "cancel by message"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Outcome:
    """How one chat ended: with one status, or wrongly."""

    plan: Plan
    code: str
    """Name of the status; STUCK when there was none in time."""
    reason: str = ""
    message: str = ""
    wrong: str = ""
    """What can't be, whatever the status: a wrong answer, two ends."""

    @property
    def label(self) -> str:
        return f"{self.code} {self.reason}".strip()


@dataclass
class Tally:
    """Counts outcomes; keeps a few of those that were wrong."""

    labels: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.labels[outcome.label] += 1
        self.plans[outcome.plan.value] += 1
        if outcome.wrong:
            self.wrong.append(f"{outcome.plan.value}, {outcome.label}: {outcome.wrong}")

    @property
    def total(self) -> int:
        return self.labels.total()


async def chat(
    stub: Any,
    plan: Plan,
    tokens: int,
    *,
    guard_s: float,
    deadline_s: float | None = None,
    prompt: str = "hi",
    model: str = MODEL,
) -> Outcome:
    """Run one chat to its status; without one after ``guard_s`` it is stuck."""
    deadline_s = deadline_s if plan is Plan.DEADLINE else None
    conversation = Conversation(stub, timeout=deadline_s)
    call = conversation.call
    wrong = ""
    try:
        async with asyncio.timeout(guard_s):
            try:
                request = start(prompt, opts=options(tokens), model=model)
                await conversation.say(request)
                await _carry_out(plan, conversation)
            except asyncio.CancelledError:
                if not call.done():  # we are cancelled ourselves, not the call by its plan
                    raise
            except (grpc.aio.AioRpcError, grpc.aio.InternalError):
                pass  # the second: writing just when the RPC ended
            except AssertionError as error:  # chats.Answer: a message that can't be
                wrong = str(error)
                call.cancel()
            code = await call.code()
    except TimeoutError:
        call.cancel()
        return Outcome(plan, "STUCK", message=f"no status after {guard_s} s")
    told = await _told(call)
    wrong = wrong or _contradiction(plan, code, conversation, tokens)
    if told == ("", "Internal error from Core"):
        return Outcome(plan, HIDDEN, *told, wrong=wrong)
    return Outcome(plan, code.name, *told, wrong=wrong)


async def _carry_out(plan: Plan, conversation: Conversation) -> None:
    if plan is Plan.CANCEL_EARLY:
        conversation.call.cancel()
    elif plan is Plan.CANCEL_LATE:
        await conversation.read()
        conversation.call.cancel()
    elif plan is Plan.CANCEL_TURN:
        await conversation.read()
        await conversation.say(CANCEL)
        await conversation.end()
    else:
        await conversation.end()


async def _told(call: Any) -> tuple[str, str]:
    """Read reason and sentence of a status."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return "", ""
    trailing = await call.trailing_metadata()
    error = grpc.aio.AioRpcError(
        code, await call.initial_metadata(), trailing, await call.details(), None
    )
    try:
        told = failure(error)
    except ValueError:  # a status of our own that the transport's end overtook
        return "", await call.details()
    return told.reason, told.message


def _contradiction(
    plan: Plan, code: grpc.StatusCode, conversation: Conversation, tokens: int
) -> str:
    """Say what in the messages doesn't go with the status."""
    answer = conversation.answers[0] if conversation.answers else None
    text = answer.text if answer and answer.choices else ""
    finished = bool(answer and answer.finished)
    if not ALPHABET[:tokens].startswith(text):
        return f"the answer is {text!r}"
    if code is not grpc.StatusCode.OK:
        return "" if plan is Plan.CANCEL_LATE or not finished else "finished, and failed"
    if not finished or answer is None:
        return "OK, and not finished"
    allowed = (_LENGTH, _CANCELLED) if plan is Plan.CANCEL_TURN else (_LENGTH,)
    if answer.finish_reason not in allowed:
        return f"OK with finish reason {answer.finish_reason}"
    if answer.finish_reason == _LENGTH and text != ALPHABET[:tokens]:
        return f"the answer is {text!r}"
    return ""
