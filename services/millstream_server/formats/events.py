"""What a model's answer consists of, in order: texts, reasoning, and calls in pieces."""

from __future__ import annotations

import enum

from millstream_server.runtime.frozen import dataclass


class Kind(enum.IntEnum):
    """What a token belongs to. Of a marker: to what it opens or closes."""

    TEXT = 0
    REASONING = 1
    CALL = 2


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; ``index`` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments: the pieces join to one JSON object."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends. ``incomplete``: it was cut, or its arguments are no JSON object."""

    index: int
    incomplete: bool


Event = Text | Reasoning | CallStart | Arguments | CallEnd
