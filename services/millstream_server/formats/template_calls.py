"""How a `response_template` says that calls are written: its field `tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.literals import Literals
from millstream_server.formats.patterns import (
    Choice,
    Group,
    Literal,
    Piece,
    Room,
    Space,
    UnmappedTemplateError,
    expanded,
    lead,
    marker_texts,
    once,
    pieces,
    runs,
    side,
    trimmed,
)
from millstream_server.formats.tagged import Json, Tagged
from millstream_server.formats.written import NAME, NUMBER, Matching, Slot, Written
from millstream_server.runtime.frozen import dataclass

_PATH = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_MARKUP = re.compile(r"[<\[{|]")
_GAP = Matching(r"\n{0,2}")
_MOST_VARIABLE = 3
"""Parts of a call's header that may match different texts: more could take long to match."""


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """How calls are written."""

    opens: tuple[str, ...]
    style: Envelope | Tagged
    written: Written | None
    drop: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()


def calls_of(field: Mapping[str, Any]) -> WrittenCalls:
    """Read the field.

    Raises:
        UnmappedTemplateError: our readers of calls can't do what it says.
    """
    transform = field.get("transform") or {}
    function = transform.get("function", transform)
    if function == "{content}":
        function = {"name": "{content.name}", "arguments": "{content.arguments}"}
    paths = {key: _path(function.get(key)) for key in ("name", "arguments")}
    if given := function.get("id") or transform.get("id"):
        paths["id"] = _path(given)
    kind = field.get("content", "text")
    if kind == "json" and (keys := _keys(paths, each=bool(field.get("transform_each")))):
        return _enveloped(field, keys)
    if paths["arguments"] == ["content"] and len(paths["name"]) == 1:
        return _TaggedCalls(
            field, {paths[key][0]: key for key in paths if key != "arguments"}
        ).calls()
    raise UnmappedTemplateError("the 'transform' of the field 'tool_calls'")


def _path(given: Any) -> list[str]:
    found = _PATH.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise UnmappedTemplateError("the 'transform' of the field 'tool_calls'")
    return found.group(1).split(".")


def _keys(paths: Mapping[str, list[str]], *, each: bool) -> dict[str, str] | None:
    """Return the keys of name, arguments and id, if they are in the same JSON object."""
    before = [] if each else ["content"]
    if any(path[:-1] != before for path in paths.values()):
        return None
    return {key: path[-1] for key, path in paths.items()}


def _enveloped(field: Mapping[str, Any], keys: Mapping[str, str]) -> WrittenCalls:
    if field.get("content_args", {}).keys() & {"string_delims", "unquoted_keys"}:
        raise UnmappedTemplateError("calls whose name is in JSON with quotes of its own")
    opens, headers, begins = marker_texts(side(field, "open"))
    if not opens or begins:
        raise UnmappedTemplateError("calls without a marker before them")
    closes = marker_texts(side(field, "close"))[0]
    id_key = (f'"{keys["id"]}": "', NUMBER, '", ') if "id" in keys else ()
    spelled = ("{", *id_key, f'"{keys["name"]}": "', NAME, f'", "{keys["arguments"]}": ')
    end = closes[0] if closes else ""
    if field.get("transform_each"):
        begin, end = f"{opens[0]}[", f"]{end}"
        written = Written(call=spelled, call_end="}", between=", ", begin=begin, end=end)
    else:
        written = Written(call=(opens[0], _GAP, *spelled), call_end=("}", _GAP, end))
    style = Envelope(
        name=(keys["name"],),
        arguments=(keys["arguments"],),
        id=(keys["id"],) if "id" in keys else (),
    )
    return WrittenCalls(once(opens), style, written, once(closes), once(headers))


class _TaggedCalls:
    """Calls whose name stands in the marker that opens them."""

    def __init__(self, field: Mapping[str, Any], groups: Mapping[str, str]) -> None:
        """Read a field; ``groups``: the pattern's groups, and what they are."""
        self._field = field
        self._groups = groups
        options = side(field, "open")
        if len(options) != 1:
            raise UnmappedTemplateError("several patterns that open calls")
        self._headers, (first, *rest) = lead(options[0])
        self._opens = tuple(expanded([first]))
        if not all(map(_MARKUP.search, self._opens)):
            raise UnmappedTemplateError("calls without a marker before them")
        last = rest.pop() if rest and isinstance(rest[-1], Literal) else None
        self._end = last.text if isinstance(last, Literal) else ""
        self._header = rest
        named = [piece.name for piece in rest if isinstance(piece, Group)]
        if not set(groups) <= set(named):
            raise UnmappedTemplateError("a call's name that isn't in what opens the call")
        variable = [piece for piece in rest if isinstance(piece, Group | Room)]
        if len(variable) > _MOST_VARIABLE:
            raise UnmappedTemplateError("a long pattern before calls")
        self._closes = [runs(option) for option in side(field, "close")]

    def calls(self) -> WrittenCalls:
        """Return how they are written."""
        kind = self._field.get("content", "text")
        if kind == "xml-inline":
            return self._key_values()
        if kind == "json":
            return self._json()
        raise UnmappedTemplateError(f"calls as {kind!r}")

    def _json(self) -> WrittenCalls:
        args = self._field.get("content_args", {})
        delimiters = args.get("string_delims", [])
        closes = once(text for runs in self._closes for run in runs for text in run)
        if not delimiters and not args.get("unquoted_keys"):
            style = self._style(Json(), self._end or "{", keeps=not self._end)
            return self._made(style, (self._end,), (closes[0] if closes else "",), drop=closes)
        if len(delimiters) != 1 or delimiters[0][0] != delimiters[0][1] or self._end.strip("{"):
            raise UnmappedTemplateError("JSON with such 'content_args'")
        style = self._style(Literals(quotes=(delimiters[0][0],)), "{")
        return self._made(style, ("{",), (closes[0] if closes else "",), drop=closes)

    def _key_values(self) -> WrittenCalls:
        args = self._field.get("content_args", {})
        if args.get("merge_duplicates"):
            raise UnmappedTemplateError("'merge_duplicates': a key that comes twice is a list")
        ends = once(text for runs in self._closes for text in runs[0])
        drop = once(t for runs in self._closes for run in runs[1:] for t in run)
        if not ends:
            raise UnmappedTemplateError("calls as 'xml-inline' without an end")
        values = _key_values(pieces(args["tag_pattern"]), ends)
        header_end = (self._end,) if self._end else (values.key, *ends)
        style = self._style(values, *header_end, keeps=not self._end)
        end = (ends[0], _GAP, drop[0]) if drop else (ends[0],)
        return self._made(style, (self._end, _GAP), end, drop=drop)

    def _style(
        self, arguments: Json | KeyValues | Literals, *ends: str, keeps: bool = False
    ) -> Tagged:
        header = "".join(map(self._source, self._header))
        return Tagged(
            header_end=ends, header=rf"\s*{header}\s*", arguments=arguments, keeps_end=keeps
        )

    def _source(self, piece: Piece) -> str:
        match piece:
            case Literal(text):
                return re.escape(text)
            case Space():
                return r"\s*"
            case Group(name, inside):
                return f"(?P<{self._groups[name]}>{inside})" if name in self._groups else inside
            case Choice(texts, optional):
                return f"(?:{'|'.join(map(re.escape, texts))})" + ("?" if optional else "")
        return piece.pattern

    def _made(
        self,
        style: Tagged,
        behind: tuple[str | Matching, ...],
        end: tuple[str | Matching, ...],
        *,
        drop: tuple[str, ...],
    ) -> WrittenCalls:
        spelled = self._spelled()
        written = None
        if spelled is not None:
            gap = _GAP if isinstance(style.arguments, KeyValues) else ""
            call = tuple(each for each in (self._opens[0], *spelled, *behind) if each != "")
            written = Written(call=call, call_end=end, gap=gap, inner_gap=gap)
        return WrittenCalls(self._opens, style, written, drop, once(self._headers))

    def _spelled(self) -> list[str | Slot | Matching] | None:
        """Return how to write the header; None: the pattern doesn't tell."""
        found: list[str | Slot | Matching] = []
        for piece in self._header:
            match piece:
                case Literal(text):
                    found.append(text)
                case Space():
                    found.append(_GAP)
                case Group(name) if self._groups.get(name) == "name":
                    found.append(NAME)
                case Choice(texts, False):
                    found.append(texts[0])
                case Choice():
                    pass
                case Room() if piece.may_be_empty:
                    pass
                case _:
                    return None
        return found


def _key_values(tag: Sequence[Piece], ends: tuple[str, ...]) -> KeyValues:
    """Read a pattern of one argument: a marker, the key, markers, the value, a marker."""
    places = [at for at, piece in enumerate(tag) if isinstance(piece, Group)]
    names = [piece.name for piece in tag if isinstance(piece, Group)]
    if names != ["key", "value"]:
        raise UnmappedTemplateError("a 'tag_pattern' without a key and then a value")
    before, between, behind = tag[: places[0]], tag[places[0] + 1 : places[1]], tag[places[1] + 1 :]
    keys, middle = runs(before), runs(between)
    if len(keys) != 1 or len(keys[0]) != 1 or not 1 <= len(middle) <= 2:  # noqa: PLR2004 (a key's end, and perhaps a value's beginning)
        raise UnmappedTemplateError("a 'tag_pattern' whose key has no markers")
    value_end, early, spaced = _value_end(behind)
    newline = spaced and (isinstance(between[-1], Space) or middle[-1][0].endswith("\n"))
    if newline:
        middle[-1] = [text.removesuffix("\n") for text in middle[-1]]
    return KeyValues(
        key=keys[0][0],
        key_end=tuple(middle[0]),
        value=middle[1][0] if len(middle) > 1 else "",
        value_end=value_end,
        early_value_end=tuple(("\n" if newline else "") + text for text in early),
        end=ends,
        newline=newline,
    )


def _value_end(behind: Sequence[Piece]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return what ends a value, what does early, and whether white space stands before it."""
    rest = trimmed(behind)
    spaced = len(rest) < len(behind) and isinstance(behind[0], Space)
    match rest:
        case [Literal(first), *more] if first.startswith("\n"):
            spaced, rest = True, [*([Literal(first[1:])] if first[1:] else []), *more]
    match rest:
        case [Choice(texts, _, _, ahead)]:
            ends, early = texts, ahead
        case _:
            ends, early = tuple(expanded(rest)), ()
    if not ends or not all(ends):
        raise UnmappedTemplateError("a 'tag_pattern' without an end of the value")
    return ends, early, spaced
