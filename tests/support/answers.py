"""Answers of models through the streaming parser, in a short notation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from millstream_server.formats.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text
from millstream_server.formats.format import Format
from millstream_server.formats.parser import Parser
from millstream_server.formats.schema import Tools

Part = tuple[str, ...]
"""("text", T), ("reasoning", T), or ("call", ID, NAME, ARGUMENTS), with "incomplete" behind it."""


def merged(events: Sequence[Event]) -> list[Part]:
    """Join what belongs together; in calls everything has to be between its start and its end."""
    parts: list[Part] = []
    call: list[str] | None = None
    fragments: list[str] = []
    for event in events:
        match event:
            case Text(text) | Reasoning(text):
                assert call is None
                kind = "text" if isinstance(event, Text) else "reasoning"
                assert text
                if parts and parts[-1][0] == kind:
                    parts[-1] = (kind, parts[-1][1] + text)
                else:
                    parts.append((kind, text))
            case CallStart(_, call_id, name):
                assert call is None
                call, fragments = ["call", call_id, name], []
            case Arguments(_, fragment):
                assert call is not None
                fragments.append(fragment)
            case CallEnd(_, incomplete):
                assert call is not None
                call.append("".join(fragments))
                parts.append((*call, "incomplete") if incomplete else tuple(call))
                call = None
    assert call is None
    return parts


def parser(
    form: Format,
    tools: Mapping[str, Any] | None = None,
    prompt: str = "",
    hidden: Mapping[int, str] | None = None,
    *,
    off: bool = False,
) -> Parser:
    """Make a parser whose new ids are the calls' numbers; ``off``: calls are text."""
    schemas = {name: json.dumps(schema) for name, schema in (tools or {}).items()}
    return Parser(
        form,
        None if off else Tools(schemas),
        prompt=prompt,
        hidden=hidden or {},
        new_id=lambda _, index: str(index),
    )


def read(parsing: Parser, pieces: Sequence[str]) -> list[Part]:
    """Read an answer that comes in pieces, each of one token."""
    events = [event for piece in pieces for event in parsing.feed(piece, (1,))]
    events += parsing.finish()
    assert parsing.feed("more") == parsing.finish() == []
    assert sum(parsing.tokens) == len(pieces)
    return merged(events)


def divided(text: str, cuts: Sequence[int]) -> list[str]:
    """Divide a text at some places."""
    places = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]
