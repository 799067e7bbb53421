"""One Chat stream: what the client has said and not yet been answered, and the context so far."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from millstream.v1 import processor_pb2
from millstream_server.processor.convert import MAX_PARTS, content_text, messages_from_proto
from millstream_server.processor.text.messages import ChatMessage, ChatRole
from millstream_server.runtime.errors import InvalidRequestError, ServingError, UnavailableError

MAX_WAITING_TURNS = 16
_HALF_CLOSE_S = 1.0
"""How long a client may take to end its conversation by itself when the server shuts down."""

_INDEX = re.compile(r"^messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Turn:
    """What the client added: messages, and new options if it sent some.

    ``kind`` is the field of ChatRequest they came in: start, user_turn or tool_results.
    """

    messages: tuple[ChatMessage, ...]
    options: processor_pb2.GenerationOptions | None
    kind: str

    def place(self, field: str, context: int) -> str:
        """Find a fault's place in the client's message.

        ``field`` counts messages from the conversation's first; ``context`` of them came in earlier
        turns.
        """
        if self.kind == "user_turn" and field.startswith("messages"):
            return "user_turn.content"
        own = _INDEX.sub(lambda match: f"messages[{int(match[1]) - context}]", field)
        return f"{self.kind}.{own}"


class Stoppable(Protocol):
    """A turn that waits for room (`runtime.places.Place`) or runs (`generation.Generation`)."""

    def cancel(self) -> None:
        """Finish it as CANCELLED."""
        ...

    def fail(self, error: ServingError) -> None:
        """End it with an error."""
        ...


class Inbox:
    """Reads a Chat stream's messages beside the turn that is running."""

    def __init__(self, refusing: Callable[[], bool] = lambda: False) -> None:
        """Start empty; ``refusing`` tells whether the server takes new turns no more."""
        self._refusing = refusing
        self._refused = False
        self._turns: deque[Turn] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self._error: ServingError | None = None
        self._running: Stoppable | None = None
        self._number = 1  # of the turn that runs or is prepared: the first, from the start on
        self._preparing = True
        self._cancelled: set[int] = set()
        self._reader: asyncio.Task[None] | None = None
        self._leaving = False

    def drain(self) -> None:
        """The server shuts down: what was asked for is still answered, then the stream ends.

        Asked for is what came before the server began to refuse.
        """
        self._leaving = True
        self._changed.set()

    def listen(self, requests: AsyncIterator[processor_pb2.ChatRequest]) -> None:
        """Begin to read; called again, go on."""
        if self._reader is None:
            self._reader = asyncio.ensure_future(self.read(requests))

    def close(self) -> None:
        """Stop reading."""
        if self._reader:
            self._reader.cancel()

    async def read(self, requests: AsyncIterator[processor_pb2.ChatRequest]) -> None:
        """Take in messages until the client half-closes."""
        try:
            async for request in requests:
                self._take(request)
        except ServingError as error:
            self._error = error
            if self._running:
                self._running.fail(error)
        finally:
            self._closed = True
            self._changed.set()

    async def next_turn(self) -> Turn | None:
        """Wait for the next turn; None when the client has closed and nothing waits.

        Raises:
            ServingError: the client broke the conversation's rules, or the server shuts down.
        """
        while True:
            if self._error:
                raise self._error
            if self._turns:
                self._number += 1
                self._preparing = True
                return self._turns.popleft()
            if self._refused:
                raise _leaving()
            if self._closed:
                return None
            self._changed.clear()
            try:
                await asyncio.wait_for(
                    self._changed.wait(), _HALF_CLOSE_S if self._leaving else None
                )
            except TimeoutError:
                raise _leaving() from None

    def running(self, turn: Stoppable) -> None:
        """This turn waits or runs now: cancels go to it, those included that came before.

        Called again when a turn that waited runs: what stopped the one stops the other.
        """
        self._running, self._preparing = turn, False
        if self._error:
            turn.fail(self._error)
        elif self._number in self._cancelled:
            turn.cancel()

    def ended(self) -> None:
        """No turn runs."""
        self._running = None
        self._cancelled.discard(self._number)

    def _cancel(self, message: processor_pb2.CancelTurn) -> None:
        """Stop a turn that runs, is prepared or waits; any other is over, or never was."""
        current = self._running is not None or self._preparing
        number = self._number if current else self._number + 1
        if message.HasField("turn"):
            number = message.turn
        if self._number + (not current) <= number <= self._number + len(self._turns):
            self._cancelled.add(number)
        if number == self._number and self._running:
            self._running.cancel()

    def _take(self, request: processor_pb2.ChatRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "cancel":
            self._cancel(request.cancel)
            return
        if kind == "user_turn":
            turn = _user_turn(request.user_turn)
        elif kind == "tool_results":
            turn = _tool_results(request.tool_results)
        elif kind == "start":
            raise InvalidRequestError.of("start", "the conversation has started already")
        else:
            raise InvalidRequestError.of(
                "message", "set one of start, user_turn, tool_results, cancel"
            )
        if len(self._turns) >= MAX_WAITING_TURNS:
            raise InvalidRequestError.of(
                kind, f"{MAX_WAITING_TURNS} turns wait already; wait for their answers"
            )
        if self._refusing():
            self._refused = True
        else:
            self._turns.append(turn)
        self._changed.set()


def _leaving() -> UnavailableError:
    return UnavailableError(
        "this server is shutting down; go on with the conversation on another one",
        retry_delay_s=0.1,
    )


def _user_turn(message: processor_pb2.UserTurn) -> Turn:
    if not message.content:
        raise InvalidRequestError.of("user_turn.content", "must not be empty")
    if len(message.content) > MAX_PARTS:
        raise InvalidRequestError.of("user_turn.content", f"at most {MAX_PARTS} parts")
    return Turn(
        (ChatMessage(ChatRole.USER, content_text(message.content)),),
        message.options if message.HasField("options") else None,
        "user_turn",
    )


def _tool_results(message: processor_pb2.ToolResults) -> Turn:
    if not message.messages:
        raise InvalidRequestError.of("tool_results.messages", "must not be empty")
    messages = tuple(messages_from_proto(message.messages, "tool_results.messages"))
    for index, result in enumerate(messages):
        if result.role is not ChatRole.TOOL:
            raise InvalidRequestError.of(
                f"tool_results.messages[{index}].role", "must be ROLE_TOOL"
            )
    return Turn(messages, None, "tool_results")
