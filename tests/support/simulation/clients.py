"""Clients of a simulated suite: each sends one request or one conversation, and keeps what came."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from millstream.v1 import chat_pb2, processor_pb2
from millstream_client.chat import ask
from millstream_client.connection import Connection
from millstream_client.errors import MillstreamError
from millstream_client.history import History
from millstream_client.history import Turn as ClientTurn
from millstream_client.request import Retry
from millstream_client.streams import AnswerStream
from millstream_server.links.channel import CallError, rpc_of
from millstream_server.runtime.errors import Code
from tests.support.simulation.answers import Answer
from tests.support.simulation.library import LibraryTransport
from tests.support.simulation.requests import Chat, Completion, Said, Turn, user
from tests.support.simulation.rpc import SimulatedChannel, SimulatedStream

CHAT = rpc_of(processor_pb2.DESCRIPTOR, "ProcessorService/Chat")
COMPLETE = rpc_of(processor_pb2.DESCRIPTOR, "ProcessorService/Complete")


@dataclass(frozen=True)
class End:
    """How a client's call ended."""

    code: Code
    message: str = ""
    reason: str = ""


@dataclass
class Talk:
    """What one client asked, and got."""

    request: Completion | Chat
    answers: list[Answer] = field(default_factory=list)
    """One, or one per turn that began."""
    messages: list[Said] = field(default_factory=list)
    """Of a chat: all that were said before its last turn's answer."""
    asked: list[list[Said]] = field(default_factory=list)
    """The messages before each answer."""
    ends: list[End] = field(default_factory=list)


class Clients:
    """Plays clients over channels to a suite's Processors."""

    def __init__(
        self,
        form: str,
        processors: int,
        channel: Callable[[str, int], SimulatedChannel],
        ready: Callable[[int], bool],
        seen: list[tuple[float, int, int]],
    ) -> None:
        """``channel`` connects a client to a Processor; ``ready`` tells if that takes calls."""
        self._form = form
        self._processors = processors
        self._channel = channel
        self._ready = ready
        self._seen = seen

    async def play(self, number: int, talk: Talk) -> None:
        """Send what a client asks, and read to the end."""
        request = talk.request
        await asyncio.sleep(request.at_s)
        client = f"client-{number}"
        limits = [s for s in (request.cancel_after_s, request.deadline_s) if s is not None]
        try:
            async with asyncio.timeout(min(limits, default=None)):
                end = await (self._by_library if request.library else self._by_hand)(
                    client, number, talk
                )
        except TimeoutError:  # gRPC ends it at the client, too
            end = End(Code.CANCELLED)
        talk.ends.append(end)

    async def _by_hand(self, client: str, number: int, talk: Talk) -> End:
        request = talk.request
        channel = self._channel(client, self._reachable(request.processor))
        try:
            if isinstance(request, Completion):
                stream = channel.begin(COMPLETE, request.to_proto(), timeout_s=request.deadline_s)
                answer = Answer()
                talk.answers.append(answer)
                async for message in self._messages(number, talk, stream):
                    answer.take(message)
            else:
                stream = channel.begin(CHAT, timeout_s=request.deadline_s)
                await self._converse(number, talk, request, stream)
        except CallError as error:
            return _end(error)
        finally:
            await channel.aclose()
        return End(Code.OK)

    def _reachable(self, first: int) -> int:
        """Return the first Processor from number ``first`` on that takes calls; else that one."""
        numbers = [(first + i) % self._processors for i in range(self._processors)]
        return next(filter(self._ready, numbers), numbers[0])

    async def _messages(
        self, number: int, talk: Talk, stream: SimulatedStream
    ) -> AsyncIterator[Any]:
        while (message := await stream.read()) is not None:
            self._note(number, message)
            yield message
            if talk.request.read_pause_s:
                await asyncio.sleep(talk.request.read_pause_s)

    def _note(self, number: int, message: Any) -> None:
        self._seen.append((asyncio.get_running_loop().time(), number, message.ByteSize()))

    # ---- a conversation

    async def _converse(
        self, number: int, talk: Talk, request: Chat, stream: SimulatedStream
    ) -> None:
        """Play a conversation's turns; if the server drains, end it behind the running one."""
        start = processor_pb2.ChatRequest(start=request.start(self._form))
        await stream.write(start)
        talk.messages.append(Said("user", request.turns[0].question(self._form)))
        messages = self._messages(number, talk, stream)
        left = list(request.turns)
        drains = False
        while left:
            turn = left.pop(0)
            if not left or drains:
                await stream.done_writing()
            answer = Answer()
            talk.answers.append(answer)
            talk.asked.append(list(talk.messages))
            with self._cancelling(turn, len(talk.answers), stream):
                drains |= await _take_turn(answer, messages)
            if not answer.finished:
                return
            talk.messages.append(_said(answer, request))
            if left and not drains:
                await stream.write(_next(talk, answer, left[0], self._form))
            elif left:
                left.clear()
                await stream.done_writing()
        async for message in messages:
            answer.late += not message.HasField("draining")

    @contextlib.contextmanager
    def _cancelling(self, turn: Turn, number: int, stream: SimulatedStream) -> Iterator[None]:
        """Cancel a turn after a while, unless it has ended before."""

        async def cancel(after_s: float) -> None:
            await asyncio.sleep(after_s)
            message = processor_pb2.ChatRequest(cancel=processor_pb2.CancelTurn(turn=number))
            with contextlib.suppress(CallError):
                await stream.write(message)

        if turn.cancel_after_s is None:
            yield
            return
        cancelling = asyncio.ensure_future(cancel(turn.cancel_after_s))
        try:
            yield
        finally:
            cancelling.cancel()

    # ---- the Python client

    async def _by_library(self, client: str, number: int, talk: Talk) -> End:
        request, answer = talk.request, Answer()
        talk.answers.append(answer)
        channels = [self._channel(client, index) for index in range(self._processors)]
        transport: Any = LibraryTransport(channels, self._ready)
        connection = Connection(transport, Retry(attempts=6))
        try:
            stream = self._asked(connection, talk)
            try:
                while (message := await stream.read()) is not None:
                    self._note(number, message)
                    answer.take(message)
                    if request.read_pause_s:
                        await asyncio.sleep(request.read_pause_s)
            finally:
                answer.resumed = bool(stream.result.resumed_after)
            if answer.resumed and answer.finished:
                answer.started = 1
                answer.finished[-1].usage.CopyFrom(stream.result.usage)
        except MillstreamError as error:
            code = Code[error.code.name] if error.code else Code.UNAVAILABLE
            return End(code, str(error), error.reason)
        finally:
            await connection.close()
        return End(Code.OK)

    def _asked(self, connection: Connection, talk: Talk) -> AnswerStream:
        request = talk.request
        if isinstance(request, Completion):
            return connection.complete(request.to_proto(), request.deadline_s)
        start = request.start(self._form)
        (message,) = start.messages
        del start.messages[:]
        talk.asked.append([Said("user", request.turns[0].question(self._form))])
        return ask(connection, History(start), ClientTurn([message]), request.deadline_s)


async def _take_turn(answer: Answer, messages: AsyncIterator[Any]) -> bool:
    """Read a turn to its end, or the stream's; return whether the server drains."""
    drains = False
    async for message in messages:
        drains |= message.HasField("draining")
        if not message.HasField("draining") or message.HasField("started") or answer.started:
            answer.take(message)
        if message.HasField("finished"):
            break
    return drains


def _said(answer: Answer, request: Chat) -> Said:
    """Return an answer as a message of the conversation: its first choice."""
    choice = answer.choices.get(0)
    if choice is None:
        return Said("assistant", "")
    if not request.events:
        return Said("assistant", choice.text)
    parts = dict.fromkeys(("text", "reasoning"), "")
    calls: list[tuple[str, str]] = []
    for kind, content in choice.pieces:
        if kind in parts:
            parts[kind] += content
        elif kind == "call":
            calls.append((content, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], content)
        elif content == "True":
            calls.pop()  # it can't be run
    return Said("assistant", parts["text"], parts["reasoning"], calls)


def _next(talk: Talk, answer: Answer, turn: Turn, form: str) -> processor_pb2.ChatRequest:
    """Ask the next question: by the results of the calls before, or as the user."""
    question = turn.question(form)
    calls = answer.choices[0].whole_calls if answer.choices else []
    if not calls:
        talk.messages.append(Said("user", question))
        return processor_pb2.ChatRequest(
            user_turn=processor_pb2.UserTurn(content=user(question).content)
        )
    results = processor_pb2.ToolResults()
    for place, call in enumerate(calls, 1):
        text = question if place == len(calls) else "done"
        talk.messages.append(Said("tool", text))
        results.messages.append(
            chat_pb2.ChatMessage(
                role=chat_pb2.CHAT_ROLE_TOOL,
                tool_call_id=call,
                content=[chat_pb2.ContentPart(text=text)],
            )
        )
    return processor_pb2.ChatRequest(tool_results=results)


def _end(error: CallError) -> End:
    failure = error.failure()
    return End(error.code, failure.message, failure.reason if error.status else "")
