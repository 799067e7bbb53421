"""A choice's answer as events: reasoning, text and tool calls, told apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millstream_server.formats.calls import Call
from millstream_server.formats.choosing import AnswerFormat
from millstream_server.formats.events import Arguments, Event, Kind, Reasoning, Text
from millstream_server.formats.parser import Parser
from millstream_server.formats.schema import Tools
from millstream_server.formats.tags import (
    Calls,
    Thinking,
    UnconstrainableError,
    Wanted,
    structural_tag,
)
from millstream_server.formats.tags import Tool as TaggedTool
from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.processor.text.messages import ChatMessage, ChatRole, Tool, ToolCall
from millstream_server.processor.text.template import NO_VARIABLES, ChatTemplate
from millstream_server.runtime.errors import UnsupportedFeatureError
from millstream_server.runtime.frozen import dataclass

_MAX_CALL_CHARS = 1 << 20
_PROMPT_END = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What a client asked for the answers of a conversation; checked as far as it can be alone."""

    events: bool = False
    """Reasoning, text and calls are told apart."""
    with_tools: bool = True
    """The model is told of the tools."""
    one_call: bool = False
    """An answer ends behind its first call."""
    must_call: bool = False
    """An answer to the user consists of calls."""
    only: str = ""
    """The one tool that may be called; empty: any."""
    variables: Mapping[str, Sequence[tuple[str, Any]]]
    """By the field that asks for it: what templates call it, and its value; each knows one."""

    def variables_for(self, template: ChatTemplate) -> Mapping[str, Any]:
        """Return what the model's template is given.

        Raises:
            UnsupportedFeatureError: it has no such variable.
        """
        if not self.variables:
            return NO_VARIABLES
        return dict(template.variable(names, field) for field, names in self.variables.items())


DEFAULT_ANSWERS = AnswerOptions(variables={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the answers to one prompt are read."""

    how: AnswerFormat
    tools: Tools
    prompt_end: str
    one_call: bool


def readable(how: AnswerFormat | None) -> AnswerFormat:
    """Return the format of a model.

    Raises:
        UnsupportedFeatureError: it isn't known how the model writes.
    """
    if how is None:
        raise UnsupportedFeatureError.of(
            "start.output",
            "it isn't known how this model writes reasoning and tool calls; the server's --formats "
            "can name it",
        )
    return how


def reading_of(how: AnswerFormat, tools: Sequence[Tool], prompt: str, *, one_call: bool) -> Reading:
    """Make the reading of the answers to ``prompt``."""
    schemas = {tool.name: tool.parameters_json_schema for tool in tools}
    return Reading(
        how=how, tools=Tools(schemas), prompt_end=prompt[-_PROMPT_END:], one_call=one_call
    )


def required_calls(
    how: AnswerFormat, answers: AnswerOptions, tools: Sequence[Tool], prompt: str
) -> Constraint:
    """Make the grammar of an answer to ``prompt`` that has to call a tool.

    Raises:
        UnsupportedFeatureError: the model's format, or a grammar, can't keep that.
    """
    wanted = Wanted(
        tools=tuple(
            TaggedTool(tool.name, json.loads(tool.parameters_json_schema or "{}")) for tool in tools
        ),
        calls=Calls.REQUIRED,
        only=answers.only,
        parallel=not answers.one_call,
        thinking=Thinking.behind(how.form, prompt),
    )
    try:
        tag = structural_tag(how.form, wanted)
    except UnconstrainableError as error:
        raise UnsupportedFeatureError.of("start.tool_choice.mode", str(error)) from error
    return Constraint(ConstraintKind.STRUCTURAL_TAG, tag or "")


class Answer:
    """Reads one choice's tokens."""

    __slots__ = ("_events", "_hidden", "_one_call", "_parser", "_reasoning", "_texts")

    def __init__(self, reading: Reading, *, shows_special: bool) -> None:
        """Begin; ``shows_special``: the text has all special tokens."""
        how = reading.how
        self._hidden: Mapping[int, str] = {} if shows_special else how.hidden
        self._parser = Parser(
            how.form, reading.tools, prompt=reading.prompt_end, hidden=self._hidden
        )
        self._one_call = reading.one_call
        self._events: list[Event] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []

    def shows(self, token_id: int) -> bool:
        """Whether the text lacks this token, but it is a marker."""
        return token_id in self._hidden

    def push(self, text: str, ids: Sequence[int]) -> bool:
        """Read on; return whether the answer ends here, since it may have one call only."""
        self._add(self._parser.feed(text, ids))
        calls = self._parser.calls
        return self._one_call and bool(calls) and calls[0].ended

    def finish(self) -> None:
        """The choice has ended."""
        self._add(self._parser.finish())

    def take(self) -> list[Event]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events

    def _add(self, events: Sequence[Event]) -> None:
        for event in events:
            self._events.append(event)
            if isinstance(event, Text):
                self._texts.append(event.text)
            elif isinstance(event, Reasoning):
                self._reasoning.append(event.text)

    @property
    def whole_calls(self) -> Sequence[Call]:
        """All calls, for one message; empty if they are too large for it."""
        calls = self._parser.calls
        chars = sum(len(fragment) for call in calls for fragment in call.fragments)
        return calls if chars <= _MAX_CALL_CHARS else ()

    @property
    def can_call(self) -> bool:
        """Whether a tool can be run now."""
        return any(not call.incomplete for call in self._parser.calls)

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.tokens[Kind.REASONING]

    @property
    def message(self) -> ChatMessage:
        """The answer as a message of the conversation; calls that can't be run are left out."""
        calls = [
            ToolCall(call.id, call.name, call.arguments_json)
            for call in self._parser.calls
            if not call.incomplete
        ]
        return ChatMessage(
            ChatRole.ASSISTANT,
            "".join(self._texts),
            tuple(calls),
            reasoning="".join(self._reasoning),
            own=True,
        )


def joined(events: Sequence[Event]) -> list[Event]:
    """Join neighbours that continue each other: one event instead of one per token."""
    made: list[Event] = []
    run: list[str] = []
    kind: type[Event] | None = None
    last: Event | None = None
    for event in [*events, None]:
        if event is not None and type(event) is kind:
            run.append(_content(event))
            continue
        if last is not None:
            made.append(_with(last, "".join(run)) if len(run) > 1 else last)
        last, kind = event, None
        if isinstance(event, Text | Reasoning | Arguments):
            kind, run = type(event), [_content(event)]
        else:
            run = []
    return made


def _content(event: Event) -> str:
    if isinstance(event, Arguments):
        return event.json
    return event.text if isinstance(event, Text | Reasoning) else ""


def _with(event: Event, content: str) -> Event:
    if isinstance(event, Arguments):
        return Arguments(event.index, content)
    return Text(content) if isinstance(event, Text) else Reasoning(content)
