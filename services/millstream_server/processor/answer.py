"""A choice's answer as events: reasoning, text and tool calls, told apart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from millstream_server.formats.calls import Call, add_piece
from millstream_server.formats.choosing import AnswerFormat
from millstream_server.formats.events import Arguments, Event, Kind, Reasoning, Text
from millstream_server.formats.format import TEXT_ALONE, Format
from millstream_server.formats.parser import PIECE_CHARS, Parser
from millstream_server.formats.schema import Tools
from millstream_server.formats.tags import Thinking
from millstream_server.processor.answer_options import CONTINUE
from millstream_server.processor.text.messages import ChatMessage, ChatRole, Tool, ToolCall
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.frozen import dataclass
from millstream_server.runtime.work.pool import WorkPool, stop_if_gone

_MAX_CALL_CHARS = 1 << 20
_PROMPT_END = 256
_NOTHING_HIDDEN: Mapping[int, str] = {}
SECONDS_PER_CHAR = 5e-6
"""About what reading an answer takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the answers to one prompt are read."""

    how: AnswerFormat
    tools: Tools | None
    """None: the model was told of none, and calls are text."""
    prompt_end: str
    one_call: bool
    off: bool = False
    """The template was told that the model isn't to reason."""
    begun: str = ""
    """What the answers go on in."""
    behind: Parser | None = None
    """Has read ``begun``."""

    def parser(self, hidden: Mapping[int, str]) -> Parser:
        """Begin to read an answer; ``hidden``: see `Parser`."""
        if self.behind is not None:
            return self.behind.fork(hidden)
        form = self.how.form if self.parsed else TEXT_ALONE
        return Parser(form, self.tools, prompt=self.prompt_end, hidden=hidden)

    @property
    def parsed(self) -> bool:
        """Whether the answers may have more than text, or markers around it."""
        form = self.how.form
        if form.framed or (form.call is not None and self.tools is not None):
            return True
        begins = self.begins if form.reasoning else Thinking.NONE
        return begins is not Thinking.NONE and not (self.off and begins is Thinking.MAY)

    @property
    def shown(self) -> Mapping[int, str]:
        """The special tokens that the text has all the same: the markers, where calls are text."""
        return self.how.hidden if self.tools is None else _NOTHING_HIDDEN

    @property
    def begins(self) -> Thinking:
        """Where the answers begin."""
        if self.behind is None:
            return Thinking.behind(self.how.form, self.prompt_end)
        return Thinking.BEGUN if self.behind.in_reasoning else Thinking.PAST


def reading_of(
    how: AnswerFormat, tools: Sequence[Tool], prompt: str, *, one_call: bool, off: bool = False
) -> Reading:
    """Make the reading of the answers to ``prompt``; ``off``: see `Reading.off`."""
    schemas = {tool.name: tool.parameters_json_schema for tool in tools}
    known, end = Tools(schemas) if tools else None, prompt[-_PROMPT_END:]
    return Reading(how=how, tools=known, prompt_end=end, one_call=one_call, off=off)


async def going_on(reading: Reading, begun: str, field: str, threads: WorkPool) -> Reading:
    """Return the reading of answers that go on in ``begun``; ``field`` asked for it.

    Raises:
        ServingError: it has a call, or too much text work waits.
    """
    if not (begun and reading.parsed):
        return replace(reading, begun=begun) if begun else reading
    parser = Parser(reading.how.form, reading.tools, begun=begun[:PIECE_CHARS])

    def work() -> None:
        for start in range(PIECE_CHARS, len(begun), PIECE_CHARS):
            stop_if_gone()
            if parser.calls:
                break
            parser.go_on(begun[start : start + PIECE_CHARS])

    if len(begun) > PIECE_CHARS:
        await threads.run(work, len(begun) * SECONDS_PER_CHAR)
    if parser.has_calls:
        sentence = "the last message has a tool call in its text, which can't be continued"
        raise InvalidRequestError.of(field, sentence)
    return replace(reading, begun=begun, behind=parser)


def text_of_prefill(message: ChatMessage, form: Format) -> str:
    """Return what an answer writes on that goes on in ``message``.

    Raises:
        UnsupportedFeatureError: that is reasoning, which the model's format hasn't.
    """
    if message.text or not message.reasoning:
        return message.text
    if not form.reasoning:
        sentence = f"the model's format, {form.name}, has no reasoning to be continued"
        raise UnsupportedFeatureError.of(CONTINUE, sentence)
    return form.reasoning[0].open + message.reasoning


class Answer:
    """Reads one choice's tokens."""

    __slots__ = ("_events", "_hidden", "_one_call", "_parser", "_reasoning", "_texts")

    def __init__(self, reading: Reading, *, shows_special: bool) -> None:
        """Begin; ``shows_special``: the text has all special tokens, not only `Reading.shown`."""
        shows = shows_special or reading.tools is None
        self._hidden = _NOTHING_HIDDEN if shows else reading.how.hidden
        self._parser = reading.parser(self._hidden)
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
                add_piece(self._texts, event.text)
            elif isinstance(event, Reasoning):
                add_piece(self._reasoning, event.text)

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
    for _, group in itertools.groupby(events, type):
        run = list(group)
        if len(run) > 1 and isinstance(run[0], Text | Reasoning | Arguments):
            run = [_with(run[0], "".join(map(_content, run)))]
        made += run
    return made


def _content(event: Event) -> str:
    if isinstance(event, Arguments):
        return event.json
    return event.text if isinstance(event, Text | Reasoning) else ""


def _with(event: Event, content: str) -> Event:
    if isinstance(event, Arguments):
        return Arguments(event.index, content)
    return Text(content) if isinstance(event, Text) else Reasoning(content)
