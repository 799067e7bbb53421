"""An answer, collected from the messages of its stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millstream.v1 import chat_pb2, generation_pb2, processor_pb2, usage_pb2
from millstream_client import structured
from millstream_client.events import ToolCall


@dataclass(slots=True)
class Choice:
    """One choice of an answer."""

    index: int = 0
    token_count: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Empty unless ``return_token_ids`` was set."""
    logprobs: list[processor_pb2.TokenLogprob] = field(default_factory=list)
    """Empty unless requested."""
    finish_reason: generation_pb2.FinishReason.ValueType = generation_pb2.FINISH_REASON_UNSPECIFIED
    matched_stop: generation_pb2.MatchedStop | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    """In the order in which the model made them."""
    _parts: list[str] = field(default_factory=list, repr=False)
    _reasoning: list[str] = field(default_factory=list, repr=False)

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def add(self, delta: processor_pb2.ChoiceDelta) -> None:
        self._parts.append(delta.text)
        for event in delta.events:
            self._add_event(event)
        self.token_count += delta.token_count
        if delta.token_ids:
            self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason:
            self.finish_reason = delta.finish_reason
            if delta.HasField("matched_stop"):
                self.matched_stop = delta.matched_stop

    def _add_event(self, event: processor_pb2.OutputEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "text":
            self._parts.append(event.text)
        elif kind == "reasoning":
            self._reasoning.append(event.reasoning)
        elif kind == "tool_call_start":
            start = event.tool_call_start
            self.tool_calls.append(ToolCall(start.id, start.name))
        elif kind == "tool_call_arguments_json":
            self.tool_calls[-1].add(event.tool_call_arguments_json)
        elif kind == "tool_call_end":
            self.tool_calls[-1].incomplete = event.tool_call_end.incomplete


@dataclass(slots=True)
class Answer:
    """The output of one turn or completion so far; `complete` is True at its end."""

    request_id: str = ""
    model: str = ""
    turn: int = 0
    """Number of the turn on its stream, from 1; 0 for a completion."""
    choices: list[Choice] = field(default_factory=list)
    """By index; one unless ``n`` was set."""
    usage: usage_pb2.GenerationUsage = field(default_factory=usage_pb2.GenerationUsage)
    """Token counts; zero until complete."""
    prompt_logprobs: list[processor_pb2.TokenLogprob] = field(default_factory=list)
    longest_pacing_interval_s: float = 0.0
    """The longest time the server gathered tokens for one message of this answer."""
    weight_version: str = ""
    """Version of the weights that made it; empty until complete, or if it isn't known."""
    complete: bool = False
    resumed_after: list[int] = field(default_factory=list)
    """Tokens that had come each time that the answer went on at another server (`Retry.go_on`)."""
    answer_type: Any = None
    """What `parsed` is; None: none was asked for."""

    @property
    def parsed(self) -> Any:
        """The first choice as an object of the ``answer_type`` that was asked for.

        Raises:
            AnswerFormatError: it was cut off, or doesn't fit the type.
            TypeError: no type was asked for.
        """
        return structured.parsed(self)

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text if self.choices else ""

    @property
    def reasoning(self) -> str:
        """The first choice's reasoning, apart from its text."""
        return self.choices[0].reasoning if self.choices else ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The first choice's tool calls."""
        return self.choices[0].tool_calls if self.choices else []

    @property
    def finish_reason(self) -> generation_pb2.FinishReason.ValueType:
        """Why the first choice ended; unspecified before."""
        return (
            self.choices[0].finish_reason
            if self.choices
            else generation_pb2.FINISH_REASON_UNSPECIFIED
        )

    def to_message(self) -> chat_pb2.ChatMessage:
        """Make the conversation's message of it; a call that can't be run is left out."""
        text, calls = self.text, [call for call in self.tool_calls if not call.incomplete]
        return chat_pb2.ChatMessage(
            role=chat_pb2.CHAT_ROLE_ASSISTANT,
            content=[chat_pb2.ContentPart(text=text)] if text or not calls else [],
            tool_calls=[call.to_proto() for call in calls],
            reasoning=self.reasoning,
        )

    @property
    def begun(self) -> bool:
        return bool(self.choices) or self.complete

    def add(self, message: processor_pb2.ChatResponse | processor_pb2.CompleteResponse) -> None:
        if message.HasField("started"):
            self.turn = getattr(message, "turn", 0)
            self.request_id = message.started.request_id
            self.model = message.started.model
        for delta in message.choices:
            while delta.index >= len(self.choices):
                self.choices.append(Choice(index=len(self.choices)))
            self.choices[delta.index].add(delta)
        self.prompt_logprobs.extend(message.prompt_logprobs)
        if message.HasField("finished"):
            self.usage.CopyFrom(message.finished.usage)
            if self.resumed_after:  # what had come before was a part of the last prompt, or about
                self.usage.completion_tokens += self.resumed_after[-1]
                self.usage.prompt_tokens -= min(self.resumed_after[-1], self.usage.prompt_tokens)
                self.usage.cached_tokens = min(self.usage.cached_tokens, self.usage.prompt_tokens)
            pacing = message.finished.longest_pacing_interval
            self.longest_pacing_interval_s = pacing.ToNanoseconds() / 1e9
            self.weight_version = message.finished.weight_version
            self.complete = True


class ParsedAnswer(Answer):
    """An answer that came of no request of this client's."""

    __slots__ = ()

    def add(self, message: Any) -> None:
        """Add one message of Parse."""
        if not self.choices:
            self.choices.append(Choice())
        self.choices[0].add(processor_pb2.ChoiceDelta(events=message.events))
        if message.HasField("finished"):
            self.usage.reasoning_tokens = message.finished.reasoning_tokens
            self.complete = True
