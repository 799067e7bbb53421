"""The structural tag of an answer: the same table that reads it says what a model may write.

A tag holds from the first token of the answer, reasoning included, so that no part of an engine has
to know where reasoning ends. It is JSON text in xgrammar's form, made without xgrammar.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from millstream_server.formats.argument_grammars import (
    NO_JSON,
    json_arguments,
    key_value_arguments,
)
from millstream_server.formats.argument_schema import MAX_PARTS, UnconstrainableError, unkept
from millstream_server.formats.element_grammars import element_arguments, markup_arguments
from millstream_server.formats.elements import Elements
from millstream_server.formats.format import Format, routes_of
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.literal_grammars import python_arguments, quoted_arguments
from millstream_server.formats.literals import Literals
from millstream_server.formats.markup import Markup
from millstream_server.formats.python_calls import PythonCalls
from millstream_server.formats.tag_parts import (
    NOTHING,
    Part,
    const,
    either,
    optional,
    regex,
    sequence,
    size_of,
    tag,
    tagged,
    text,
)
from millstream_server.formats.tagged import Tagged
from millstream_server.formats.written import NAME, Written, piece
from millstream_server.runtime.frozen import dataclass

__all__ = ["Thinking", "Tool", "UnconstrainableError", "Wanted", "structural_tag"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


class Thinking(enum.Enum):
    """Where an answer begins."""

    NONE = enum.auto()
    """Behind reasoning, or there is none."""
    MAY = enum.auto()
    """Before reasoning, which the model may leave out."""
    BEGUN = enum.auto()
    """Inside of reasoning: the prompt has opened it."""
    PAST = enum.auto()
    """Inside of its text: the prompt has begun it."""

    @classmethod
    def behind(cls, form: Format, prompt: str) -> Thinking:
        """Return where an answer to a rendered prompt begins."""
        end = prompt.rstrip()
        written = form.written
        if form.opened_by(prompt) in [span.open for span in form.reasoning]:
            return cls.BEGUN
        closed = [span.close for span in form.reasoning]
        if written is not None and written.answer_open:
            closed.append(written.answer_open)
        return cls.NONE if not closed or end.endswith(tuple(closed)) else cls.MAY


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, and whether its arguments have to fit its schema exactly."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an answer has to be."""

    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    only: str = ""
    """The one tool to be called; empty: any."""
    parallel: bool = True
    """Several calls may be made."""
    thinking: Thinking = Thinking.NONE
    answer: Part | None = None
    """What the answer's text has to match, if it has some; None: any text."""
    reasoning_tokens: int | None = None
    """Most tokens of reasoning, its markers apart; None: any number."""


def structural_tag(
    form: Format, wanted: Wanted, between: Callable[[], None] = lambda: None
) -> str | None:
    """Return the tag as JSON text; None: nothing is asked for that needs one.

    ``between`` is called before each tool: it may raise, to give the work up.

    Arguments fit the schemas of strict tools; if calls are required or one is named, those of all
    tools, as far as grammars can keep them.

    Raises:
        UnconstrainableError: the format has no grammar of calls, a strict tool's schema asks for
            what a grammar can't keep, or ``only`` names no tool.
    """
    if not _binds(wanted) and wanted.reasoning_tokens is None:
        return None
    grammar = _Answer(form, wanted, between)
    whole = sequence(grammar.reasoning(), grammar.body())
    return json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False)


def _binds(wanted: Wanted) -> bool:
    """Whether text and calls aren't free."""
    if wanted.answer is not None or wanted.must_call or wanted.only:
        return True
    return bool(wanted.tools) and (not wanted.parallel or any(t.strict for t in wanted.tools))


class _Answer:
    """The grammar of one answer."""

    def __init__(self, form: Format, wanted: Wanted, between: Callable[[], None]) -> None:
        self._form = form
        self._wanted = wanted
        self._between = between
        self._left = MAX_PARTS
        """How many parts the grammars of arguments may have."""
        self._must = wanted.must_call or bool(wanted.only)
        self._markers = tuple(routes_of(form).actions)
        self._written = form.written or Written(call=())

    def reasoning(self) -> Part:
        """What stands before text and calls."""
        thinking, spans = self._wanted.thinking, self._form.reasoning
        if thinking in (Thinking.NONE, Thinking.PAST) or not spans:
            return NOTHING
        span = spans[0]
        begun = thinking is Thinking.BEGUN
        others = [marker for marker in self._markers if marker != span.close]
        inside = text(others, tokens=self._wanted.reasoning_tokens)
        block = tag("" if begun else span.open, inside, span.close)
        behind = self._written.after_reasoning
        block = sequence(block, regex(behind)) if behind else block
        return block if begun else optional(block)

    def body(self) -> Part:
        """The text, the calls, or both."""
        if not _binds(self._wanted):
            return text(span.open for span in self._form.reasoning)
        written = self._written
        calls = self._calls()
        if written.answer_first:
            behind = NOTHING if calls is None else calls if self._must else optional(calls)
            return sequence(self._text(), behind, const(written.after))
        begun = written.apart and self._wanted.thinking is Thinking.PAST
        if calls is None or (begun and not self._must):
            return self._text()
        if begun:
            sentence = f"in the format {self._form.name} no call can follow text that has begun"
            raise UnconstrainableError(sentence)
        if self._must:
            return calls
        if self._wanted.answer is not None or written.apart:
            return either([self._text(), calls])
        return self._mixed()

    # ---- text

    def _text(self) -> Part:
        written, answer = self._written, self._wanted.answer
        inside = self._plain() if answer is None else answer
        thinking = self._wanted.thinking
        opened = written.answer_first and thinking is Thinking.NONE
        begin = "" if opened or thinking is Thinking.PAST else written.answer_open
        if written.answer_close and answer is None:
            return tag(begin, inside, written.answer_close)
        return sequence(const(begin), inside, const(written.answer_close))

    def _plain(self) -> Part:
        """Text without calls."""
        any_text = text(self._markers)
        if self._form.call is None or not self._form.call.bare:
            return any_text
        # A call may begin without any marker: the first character tells.
        return optional(sequence(regex(NO_JSON), any_text))

    # ---- calls

    def _tags(self) -> list[Part]:
        """Return a tag for each tool that may be called."""
        wanted = self._wanted
        tools = [tool for tool in wanted.tools if wanted.only in ("", tool.name)]
        if not tools:
            raise UnconstrainableError(f"there is no tool {wanted.only!r} to be called")
        if self._form.written is None:
            raise UnconstrainableError(f"the format {self._form.name} has no grammar of calls")
        return [self._call(tool) for tool in tools]

    def _calls(self) -> Part | None:
        """Calls, one behind the other; None: there are to be none."""
        wanted, written = self._wanted, self._written
        if not self._must and not wanted.tools:
            return None
        listed = {
            "type": "tags_with_separator",
            "tags": self._tags(),
            "separator": written.between,
            "at_least_one": True,
            "stop_after_first": self._stops,
        }
        return sequence(piece(written.lead), const(written.begin), listed, const(written.end))

    @property
    def _stops(self) -> bool:
        return not self._wanted.parallel or bool(self._wanted.only)

    def _mixed(self) -> Part:
        """Text with calls in it."""
        written = self._written
        if written.begin:
            listed = {
                "type": "tags_with_separator",
                "tags": self._tags(),
                "separator": written.between,
                "at_least_one": True,
                "stop_after_first": self._stops,
            }
            tags = [tagged(sequence(const(written.begin), listed, const(written.end)))]
        else:
            tags = self._tags()
        begin: str = tags[0]["begin"]
        trigger = max((each for each in self._markers if begin.startswith(each)), key=len)
        return {
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": tags,
            "excludes": [each for each in self._markers if each != trigger],
            "stop_after_first": self._stops,
        }

    def _call(self, tool: Tool) -> Part:
        self._between()
        written = self._written
        if not _NAME.fullmatch(tool.name):
            sentence = f"the name {tool.name[:64]!r} can't be written as a call"
            raise UnconstrainableError(sentence, tool.name)
        header = [piece(tool.name if each is NAME else each) for each in written.call]
        ends = (written.call_end,) if isinstance(written.call_end, str) else written.call_end
        return tagged(sequence(*header, self._kept(tool), *map(piece, ends)))

    def _kept(self, tool: Tool) -> Part:
        """The arguments of a tool, as far as a grammar keeps its schema."""
        if not tool.strict:
            try:
                return self._arguments(tool.schema if self._must else {})
            except UnconstrainableError:
                return self._arguments({})
        for keyword in unkept(tool.schema):
            sentence = f"{tool.name}: no grammar keeps {keyword!r} of its schema"
            raise UnconstrainableError(sentence, tool.name)
        try:
            return self._arguments(tool.schema)
        except UnconstrainableError as error:
            raise UnconstrainableError(f"{tool.name}: {error}", tool.name) from error

    def _arguments(self, schema: Mapping[str, Any]) -> Part:
        part = self._by_style(schema)
        self._left -= (size := size_of(part, {}))
        if self._left < 0:
            self._left += size
            raise UnconstrainableError(f"the grammar would have more than {MAX_PARTS} parts")
        return part

    def _by_style(self, schema: Mapping[str, Any]) -> Part:
        call = self._form.call
        style = call.arguments if isinstance(call, Tagged) else call
        match style:
            case KeyValues():
                return key_value_arguments(style, self._written, schema)
            case Literals():
                return quoted_arguments(style.quotes[0], schema)
            case Markup():
                return markup_arguments(style, schema)
            case Elements():
                return element_arguments(style, schema)
            case PythonCalls():
                return python_arguments(schema)
        return json_arguments(schema)
