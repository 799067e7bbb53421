"""What was said in a conversation, and what to send to go on with it; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.v1 import chat_pb2, processor_pb2
from millstream_client.answers import Answer
from millstream_client.errors import InvalidRequestError, MillstreamError
from millstream_client.requests import assistant


@dataclass(slots=True)
class Turn:
    """What the caller adds to a conversation."""

    messages: Sequence[chat_pb2.Message]
    options: processor_pb2.GenerationOptions | None = None
    """New options from this turn on; None: they stay."""

    def request(self) -> processor_pb2.ChatRequest:
        """Say it on a stream that has the conversation already."""
        if not self.messages or self.messages[0].role == chat_pb2.ROLE_TOOL:
            results = processor_pb2.ToolResults(messages=self.messages)
            return processor_pb2.ChatRequest(tool_results=results)
        turn = processor_pb2.UserTurn(content=self.messages[0].content, options=self.options)
        return processor_pb2.ChatRequest(user_turn=turn)


class Dialogue:
    """The finished turns: a stream that broke is replaced by one that starts with them."""

    def __init__(self, start: processor_pb2.ChatStart) -> None:
        """Begin with ``start``, whose messages are what was said before."""
        self._start = start
        self._answered = False

    @property
    def messages(self) -> tuple[chat_pb2.Message, ...]:
        """Everything said so far."""
        return tuple(self._start.messages)

    @property
    def request_id(self) -> str:
        """The conversation's id in logs and traces."""
        return self._start.request_id

    def start(self, turn: Turn) -> processor_pb2.ChatRequest:
        """Say it on a new stream, with everything said before."""
        start = processor_pb2.ChatStart()
        start.CopyFrom(self._start)
        start.messages.extend(turn.messages)
        if turn.options is not None:
            start.options.CopyFrom(turn.options)
        return processor_pb2.ChatRequest(start=start)

    def finished(self, turn: Turn, answer: Answer) -> None:
        """Keep a turn; one that failed is forgotten, with its options."""
        self._start.messages.extend(turn.messages)
        self._start.messages.append(assistant(answer.text))
        if turn.options is not None:
            self._start.options.CopyFrom(turn.options)
        self._answered = True

    def mend(self, turn: Turn, error: MillstreamError) -> bool:
        """Make a re-opened conversation fit; answers whether it is worth another attempt.

        On one stream the server bounds a later turn's max_new_tokens by the room that is left, but
        a stream's first turn must fit. A conversation that was re-opened is such a first turn:
        refused for max_new_tokens, it asks for the room that is left, which is less than that.
        """
        options = turn.options if turn.options is not None else self._start.options
        too_long = isinstance(error, InvalidRequestError) and any(
            violation.field.endswith("sampling.max_new_tokens") for violation in error.violations
        )
        if not (self._answered and too_long and options.sampling.max_new_tokens > 0):
            return False
        mended = processor_pb2.GenerationOptions()
        mended.CopyFrom(options)
        mended.sampling.ClearField("max_new_tokens")
        turn.options = mended
        return True
