"""What a conversation consists of: its finished turns, and the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from millstream.v1 import chat_pb2, processor_pb2
from millstream_client.answers import Answer
from millstream_client.errors import InvalidRequestError, MillstreamError
from millstream_client.functions import Function
from millstream_client.requests import AnyMessage, read_messages


@dataclass(slots=True)
class Turn:
    """A turn: what the caller adds to a conversation."""

    said: Sequence[AnyMessage]
    options: processor_pb2.GenerationOptions | None = None
    """New options from this turn on; None: the old ones stay."""
    messages: Sequence[chat_pb2.ChatMessage] = ()
    """The same as the contract's messages; empty before `read`."""

    async def read(self) -> None:
        """Read the files of images and videos, once.

        Raises:
            MediaFileError: one can't be read.
        """
        if not self.messages:
            self.messages = await read_messages(self.said)

    def request(self) -> processor_pb2.ChatRequest:
        """Make the message for a stream that has the conversation's messages already."""
        if not self.messages or self.messages[0].role == chat_pb2.CHAT_ROLE_TOOL:
            results = processor_pb2.ToolResults(messages=self.messages)
            return processor_pb2.ChatRequest(tool_results=results)
        turn = processor_pb2.UserTurn(content=self.messages[0].content, options=self.options)
        return processor_pb2.ChatRequest(user_turn=turn)


class History:
    """The finished turns: after a broken stream, a new one starts with them."""

    def __init__(
        self,
        start: processor_pb2.ChatStart,
        said: Sequence[AnyMessage] = (),
        functions: Mapping[str, Function] = MappingProxyType({}),
    ) -> None:
        self._start = start
        self.functions = functions
        """The Python functions among the tools, by name."""
        self._has_turns = False
        self._unread: Sequence[AnyMessage] = ()
        plain = [message for message in said if isinstance(message, chat_pb2.ChatMessage)]
        if len(plain) == len(said):
            start.messages.extend(plain)
        else:
            self._unread = said

    @property
    def messages(self) -> tuple[chat_pb2.ChatMessage, ...]:
        return tuple(self._start.messages)

    @property
    def tools(self) -> Sequence[chat_pb2.ChatTool]:
        return self._start.tools

    @property
    def choices(self) -> int:
        """How many choices an answer has."""
        return self._start.options.n or 1

    @property
    def request_id(self) -> str:
        return self._start.request_id

    async def read(self, turn: Turn) -> None:
        """Read the files of images and videos of a turn and of the messages before, once.

        Raises:
            MediaFileError: one can't be read.
        """
        if self._unread:
            self._start.messages.extend(await read_messages(self._unread))
            self._unread = ()
        await turn.read()

    def start(self, turn: Turn) -> processor_pb2.ChatRequest:
        """Make the message that starts a new stream with all messages so far and this turn."""
        start = processor_pb2.ChatStart()
        start.CopyFrom(self._start)
        start.messages.extend(turn.messages)
        if turn.options is not None:
            start.options.CopyFrom(turn.options)
        return processor_pb2.ChatRequest(start=start)

    def add(self, turn: Turn, answer: Answer) -> None:
        self._start.messages.extend(turn.messages)
        self._start.messages.append(answer.to_message())
        if turn.options is not None:
            self._start.options.CopyFrom(turn.options)
        self._has_turns = True

    def refit(self, turn: Turn, error: MillstreamError) -> bool:
        """Remove max_new_tokens from a turn refused because of it; return whether it was.

        On one stream the server limits a later turn's max_new_tokens to the context that is left,
        but a stream's first turn must fit. A conversation on a new stream is such a first turn:
        without max_new_tokens it gets all of the context that is left, which is less.
        """
        options = turn.options if turn.options is not None else self._start.options
        too_long = isinstance(error, InvalidRequestError) and any(
            violation.field.endswith("sampling.max_new_tokens") for violation in error.violations
        )
        if not (self._has_turns and too_long and options.sampling.max_new_tokens > 0):
            return False
        turn.options = processor_pb2.GenerationOptions()
        turn.options.CopyFrom(options)
        turn.options.sampling.ClearField("max_new_tokens")
        return True
