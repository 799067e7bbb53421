"""A format: how models of some families write reasoning and calls, as a table."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.finder import Finder
from millstream_server.formats.python_calls import PythonCalls
from millstream_server.formats.tagged import Tagged
from millstream_server.formats.written import Written

CallStyle = Envelope | Tagged | PythonCalls


def call_id(_name: str, _index: int) -> str:
    """Make an id for a call of a model that writes none."""
    return f"call_{os.urandom(12).hex()}"


@dataclass(frozen=True, slots=True)
class Span:
    """Two markers, and what is between them."""

    open: str
    close: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Format:
    """How some models write an answer.

    Each marker is one text, even if it is one token: `hidden` finds the tokens.
    """

    name: str
    models: str
    """Which models write so, for people."""
    reasoning: tuple[Span, ...] = ()
    """What reasoning stands between; a prompt that ends with the first marker has begun it."""
    begins_reasoning: bool = False
    """An answer is reasoning from its beginning, unless the prompt has ended that."""
    call_open: tuple[str, ...] = ()
    """What stands before a call, or before the first one of an array."""
    call: CallStyle | None = None
    """What follows; None: the models make no calls."""
    section: Span | None = None
    """What stands around all calls. Then calls are only there, unless `calls_anywhere`."""
    calls_anywhere: bool = False
    text_open: tuple[str, ...] = ()
    """What stands before text, if anything does; it ends reasoning that was left open, too."""
    call_drop: tuple[str, ...] = ()
    """Other markers of calls: they mean nothing, and are not shown."""
    drop: tuple[str, ...] = ()
    """Likewise, of what is no call."""
    headers: tuple[str, ...] = ()
    """Likewise, and what stands behind them, up to the next marker, is not shown either."""
    begun: tuple[str, ...] = ()
    """What a prompt may end with, besides the beginning of reasoning, that the answer continues."""
    newlines: int = 2
    """So many newlines before a marker belong to it; all do that stand behind one. 0: neither."""
    written: Written | None = None
    """How calls are written exactly; None: they can't be constrained."""
    new_id: Callable[[str, int], str] = call_id
    """Makes a call's id of its name and index, where the model writes none."""

    def opened_by(self, prompt: str) -> str:
        """Return the marker, or part of one, that a prompt ends with and the answer continues."""
        end = prompt[-_PROMPT_END:].rstrip()
        begun = (*[span.open for span in self.reasoning], *self.begun)
        found = next((marker for marker in begun if end.endswith(marker.rstrip())), "")
        if found or not self.begins_reasoning:
            return found
        closed = any(end.endswith(span.close.rstrip()) for span in self.reasoning)
        return "" if closed else self.reasoning[0].open

    @property
    def framed(self) -> bool:
        """Whether text stands between markers, too."""
        return bool(self.text_open or self.headers or self.drop)

    def hidden(self, special_tokens: Iterable[tuple[int, str]]) -> Mapping[int, str]:
        """Return, of a vocabulary's special tokens, those that markers consist of.

        Text without special tokens lacks them; `Parser` needs them.
        """
        markers = list(_texts(self))
        return {
            token_id: text
            for token_id, text in special_tokens
            if text and any(text in marker for marker in markers)
        }


TEXT_ALONE = Format(name="", models="", newlines=0)
"""Of answers without any marker."""
_PROMPT_END = 64


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a table, its markers among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _texts(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in {"name", "models", "written"} or not isinstance(value, Format):
                yield from _texts(getattr(value, field.name))


class Route(enum.Enum):
    """What a marker does between calls."""

    REASON = enum.auto()
    TEXT = enum.auto()
    SECTION = enum.auto()
    SECTION_END = enum.auto()
    CALL = enum.auto()
    DROP = enum.auto()
    HEADER = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """A format's markers between calls."""

    outside: Finder
    inside: Finder
    """Inside of a section, or of a call that is text."""
    actions: Mapping[str, Route]


@functools.cache
def routes_of(form: Format, *, calls: bool = True) -> Routes:
    """Return a format's markers and what they do.

    Without ``calls`` those of calls are text: what follows one stands inside, and there the frame's
    markers are text, too, up to the call's end.
    """
    frame = dict.fromkeys(form.headers, Route.HEADER) | dict.fromkeys(form.drop, Route.DROP)
    frame |= dict.fromkeys(form.text_open, Route.TEXT)
    others = dict.fromkeys(form.call_drop, Route.DROP if calls else Route.SECTION_END)
    for span in form.reasoning:
        others |= {span.close: Route.TEXT, span.open: Route.REASON}
    if form.section is not None:
        others |= {form.section.open: Route.SECTION, form.section.close: Route.SECTION_END}
    opens = dict.fromkeys(form.call_open, Route.CALL)
    actions = frame | others | opens
    outside, inside = actions, actions if calls else others | opens
    if calls and form.section is not None and not form.calls_anywhere:
        outside = frame | others
    return Routes(
        Finder(outside, newlines=form.newlines), Finder(inside, newlines=form.newlines), actions
    )
