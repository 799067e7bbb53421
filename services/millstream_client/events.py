"""What a model's answer consists of: text, reasoning, and tool calls in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millstream.v1 import chat_pb2, processor_pb2
from millstream_client.errors import AnswerFormatError

if TYPE_CHECKING:
    from millstream_client.answers import Answer


@dataclass(slots=True)
class ToolCall:
    """A call that the model makes; it grows while its arguments arrive."""

    id: str
    """What its result refers to."""
    name: str
    """The tool, as the model wrote it: it may be none of those that were offered."""
    incomplete: bool = True
    """Whether it can't be run: it is still being received, was cut off, or its arguments are no
    JSON object."""
    _parts: list[str] = field(default_factory=list, repr=False)

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text, as far as they came."""
        return "".join(self._parts)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name.

        Raises:
            AnswerFormatError: the call is `incomplete`.
        """
        if self.incomplete:
            raise AnswerFormatError(
                f"the call of {self.name!r} isn't whole: it is still being received, or was cut "
                "off, or its arguments are no JSON object",
                reason="TOOL_CALL_INCOMPLETE",
            )
        arguments: dict[str, Any] = json.loads(self.arguments_json)
        return arguments

    def add(self, arguments_json: str) -> None:
        self._parts.append(arguments_json)

    def to_proto(self) -> chat_pb2.ToolCall:
        return chat_pb2.ToolCall(id=self.id, name=self.name, arguments_json=self.arguments_json)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text for the reader of the answer, to be appended to the text so far."""

    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """The model's reasoning, to be appended to the reasoning so far."""

    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins. Its arguments and its end follow before anything else does."""

    call: ToolCall
    choice: int = 0


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments: the pieces join to one JSON object."""

    json: str
    call: ToolCall
    choice: int = 0


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A tool call ends; it may be `ToolCall.incomplete`."""

    call: ToolCall
    choice: int = 0


Event = TextPiece | ReasoningPiece | CallStarted | CallArguments | CallEnded


class EventReader:
    """Makes events of an answer's deltas, which the answer has already."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._running: dict[int, ToolCall] = {}
        """The latest call of each choice."""

    def read(self, delta: processor_pb2.ChoiceDelta) -> Iterator[Event]:
        choice = delta.index
        if delta.text:
            yield TextPiece(delta.text, choice)
        for event in delta.events:
            kind = event.WhichOneof("event")
            if kind == "text":
                yield TextPiece(event.text, choice)
            elif kind == "reasoning":
                yield ReasoningPiece(event.reasoning, choice)
            elif kind == "tool_call_start":
                call = self._answer.choices[choice].tool_calls[event.tool_call_start.index]
                self._running[choice] = call
                yield CallStarted(call, choice)
            elif kind == "tool_call_arguments_json":
                piece = event.tool_call_arguments_json
                yield CallArguments(piece, self._running[choice], choice)
            elif kind == "tool_call_end":
                yield CallEnded(self._running[choice], choice)
