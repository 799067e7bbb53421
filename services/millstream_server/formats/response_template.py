"""A checkpoint's own `response_template` as a format: what transformers 5.13 and later read.

Its fields are regions between markers. Those of reasoning, text and calls become our table, so that
calls stream too; what the table can't say is refused, and the sentence names it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from millstream_server.formats.format import Format, Span
from millstream_server.formats.patterns import UnmappedTemplateError, marker_texts, once, side
from millstream_server.formats.template_calls import calls_of
from millstream_server.formats.written import Written

_REASONING = ("thinking", "reasoning", "reasoning_content")
_SPECIAL = re.compile(r"<\|[^<>|]+\|>")


@functools.lru_cache(maxsize=64)
def format_of(source: str) -> Format:
    """Return the format that a template, as JSON text, describes.

    Raises:
        UnmappedTemplateError: it has something that the table can't say, or isn't a template.
    """
    try:
        template = json.loads(source)
        return _Template(template).form()
    except UnmappedTemplateError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UnmappedTemplateError("it is no template of version 1") from error


class _Template:
    """A template, and what has been read of it."""

    def __init__(self, template: Mapping[str, Any]) -> None:
        if template.get("version", 1) != 1:
            raise UnmappedTemplateError(f"version {template['version']!r}")
        self._fields: dict[str, Mapping[str, Any]] = dict(template["fields"])
        known = {*_REASONING, "content", "tool_calls"}
        for name in [*self._fields, *template.get("defaults", {})]:
            if name not in known and name != "role":
                raise UnmappedTemplateError(f"the field {name!r}")
        try:
            self._anchors = marker_texts(side(template, "start_anchor"))[0]
        except UnmappedTemplateError:  # only prompts have it
            self._anchors = []
        self._headers: list[str] = []
        """Markers with a text behind them that means nothing."""
        self._drop: list[str] = []

    def form(self) -> Format:
        """Return the whole table."""
        reasoning, begins = self._reasoning()
        opens, closes = self._content()
        calls = calls_of(self._fields["tool_calls"]) if "tool_calls" in self._fields else None
        if calls is not None:
            self._headers += calls.headers
        if opens:  # the text has markers: what begins a turn may stand between the regions
            self._drop += [anchor for anchor in self._anchors if not anchor[0].isalnum()]
        markers = [*self._drop, *opens, *((*calls.drop, *calls.opens) if calls else ())]
        for span in reasoning:
            markers += (span.open, span.close)
        first, others = _special_tokens(markers)
        drop = once(each for each in (*self._drop, *others) if each not in self._headers)
        call_drop = once(each for each in (calls.drop if calls else ()) if each not in drop)
        around = self._around(calls.written, opens, closes) if calls and calls.written else None
        return Format(
            name="response_template",
            models="those whose checkpoint has one",
            reasoning=reasoning,
            begins_reasoning=begins,
            call_open=calls.opens if calls else (),
            call=calls.style if calls else None,
            text_open=once(opens),
            call_drop=once(each for each in call_drop if each not in self._headers),
            drop=drop,
            headers=once([*self._headers, *(each for each in first if each not in self._drop)]),
            begun=once(self._headers),
            newlines=0 if self._keeps_space() else 2,
            written=around,
        )

    def _reasoning(self) -> tuple[tuple[Span, ...], bool]:
        names = [each for each in _REASONING if each in self._fields]
        if not names:
            return (), False
        if len(names) > 1:
            raise UnmappedTemplateError(f"the fields {names[0]!r} and {names[1]!r} together")
        name = names[0]
        field = self._text_field(name)
        opens, headers, begins = marker_texts(side(field, "open"))
        closes, _, _ = marker_texts(side(field, "close"))
        if not opens or not closes:
            raise UnmappedTemplateError(f"the field {name!r} has no text at its beginning or end")
        self._headers += headers
        return tuple(Span(first, last) for first in opens for last in closes), begins

    def _content(self) -> tuple[list[str], list[str]]:
        if "content" not in self._fields:
            return [], []
        field = self._text_field("content")
        opens, headers, _ = marker_texts(side(field, "open"))
        closes, _, _ = marker_texts(side(field, "close"))
        self._headers += headers
        self._drop += closes
        return opens, closes

    def _text_field(self, name: str) -> Mapping[str, Any]:
        field = self._fields[name]
        if field.get("content", "text") != "text" or field.get("transform") is not None:
            raise UnmappedTemplateError(f"the field {name!r} isn't plain text")
        return field

    def _keeps_space(self) -> bool:
        fields = [field for name, field in self._fields.items() if name != "tool_calls"]
        return any(field.get("content_args", {}).get("strip") is False for field in fields)

    def _around(self, written: Written, opens: list[str], closes: list[str]) -> Written:
        """Add how text is written."""
        turn = "|".join(map(re.escape, self._anchors)) if opens else ""
        return replace(
            written,
            answer_open=opens[0] if opens else "",
            answer_close=closes[0] if opens and closes else "",
            apart=bool(opens),
            after_reasoning=f"({turn})?" + r"\n{0,2}" if turn else r"\n{0,2}",
        )


def _special_tokens(markers: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the special tokens that markers consist of: first ones and others.

    Alone they are no text, either.
    """
    firsts: list[str] = []
    others: list[str] = []
    for marker in markers:
        first, *more = _SPECIAL.findall(marker) or [""]
        if first and first != marker and marker.startswith(first):
            firsts.append(first)
        others += more
    return firsts, others
