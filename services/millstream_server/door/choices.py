"""A choice of a turn that a Processor runs: what has come of it, and its deltas."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.v1 import processor_pb2
from millstream_server.door import wire
from millstream_server.formats.events import Event, Reasoning, Text
from millstream_server.generation.output import FinishReason, TokenLogprob
from millstream_server.processor.choice import Delta
from millstream_server.processor.text.messages import ChatMessage, ChatRole


class RemoteChoice:
    """A `processor.pulled.PulledChoice`: its deltas come from a Processor."""

    def __init__(self, index: int, texts: dict[int, bytes]) -> None:
        """``texts`` gets the bytes of tokens."""
        self.index = index
        self.unsent: list[processor_pb2.ChoiceDelta] = []
        self.result: processor_pb2.ChoiceDelta | None = None
        self.finish_reason: FinishReason | None = None
        self.tokens = 0
        """In all deltas so far."""
        self._token_texts = texts
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._call = 0

    has_more = False

    def add(self, delta: processor_pb2.ChoiceDelta) -> None:
        self.unsent.append(delta)
        self.tokens += delta.token_count
        if delta.finish_reason:
            self.result = delta

    @property
    def held_bytes(self) -> int:
        return sum([delta.ByteSize() for delta in self.unsent])

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def message(self) -> ChatMessage:
        reasoning = "".join(self._reasoning)
        return ChatMessage(ChatRole.ASSISTANT, self.text, reasoning=reasoning, own=True)

    def drop(self) -> None:
        self.unsent = []

    def take_text(self) -> tuple[str, int]:
        deltas, self.unsent = self.unsent, []
        text = "".join([delta.text for delta in deltas])
        self._texts.append(text)
        return text, sum([delta.token_count for delta in deltas])

    def take(self, *, failed: bool = False) -> Delta | None:
        deltas, self.unsent = self.unsent, []
        if not deltas:
            return None
        events: list[Event] = []
        logprobs: list[TokenLogprob] = []
        for each in deltas:
            found, self._call = wire.events_of(each, self._call)
            events += found
            logprobs += wire.logprobs_of(each, self._token_texts)
        delta = wire.delta_of(self.index, deltas, events, logprobs)
        self.finish_reason = delta.finish_reason
        self._texts += [delta.text, *(event.text for event in events if isinstance(event, Text))]
        self._reasoning += [event.text for event in events if isinstance(event, Reasoning)]
        return delta


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The bytes of tokens whose logprobs have come."""

    found: dict[int, bytes] = field(default_factory=dict)

    def token_bytes(self, token_id: int) -> bytes:
        return self.found[token_id]
