"""How a model writes calls and what is around them, exactly: what its grammar asks for.

The parser takes more than that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from millstream_server.formats.tag_parts import Part, const, regex


class Slot(enum.Enum):
    """What differs from call to call."""

    NAME = enum.auto()


NAME = Slot.NAME


@dataclass(frozen=True, slots=True)
class Matching:
    """What a regular expression matches, whole."""

    pattern: str


NUMBER = Matching("[0-9]{1,4}")
"""A number of a call."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Written:
    """How calls are written, the arguments apart: these follow from the format's table."""

    call: tuple[str | Slot | Matching, ...]
    """What stands before the arguments, the opening marker first."""
    call_end: str | tuple[str | Matching, ...] = ""
    """What stands behind them."""
    between: str = ""
    """What stands between two calls."""
    begin: str = ""
    """What stands before the first call, behind `lead`."""
    end: str = ""
    """What stands behind the last call."""
    lead: str | Matching = ""
    """What stands before calls that nothing but reasoning precedes."""
    gap: str | Matching = ""
    """What stands behind each argument, where arguments have markers."""
    inner_gap: str | Matching = ""
    """What stands between a key and its value there."""
    answer_open: str = ""
    """What stands before text."""
    answer_close: str = ""
    """What stands behind it; empty, too, where the answer's end stands for it."""
    apart: bool = False
    """An answer has calls or text, not both."""
    answer_first: bool = False
    """Calls stand behind a text, which may be empty; without reasoning the prompt has opened it."""
    after: str = ""
    """What ends the answer, behind calls and text."""
    after_reasoning: str = r"\n{0,2}"
    """A regular expression of what stands behind reasoning."""


def piece(given: str | Matching) -> Part:
    """Return the grammar of a piece."""
    return regex(given.pattern) if isinstance(given, Matching) else const(given)
