"""Tools of the Responses API, as a model knows them: functions, each with one name.

A custom tool takes a text: the model is told of a function with that text as its one argument. A
tool of a namespace has both names in its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.formats.regular.lark import lark_pattern
from millstream_server.formats.regular.regex import rewritten
from millstream_server.processor.http.requests import schema_text
from millstream_server.processor.http.responses import schema
from millstream_server.processor.text.messages import MAX_TOOLS, Tool
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.frozen import dataclass
from millstream_server.runtime.work.pool import stop_if_gone

_ARGUMENT = "input"
SEARCH = "tool_search"
"""A function that finds more tools, which the client runs: its type, and its name."""
TYPES = frozenset(("function", "custom", SEARCH))
_MAX_GRAMMAR = 16 * 1024
_KEPT_GRAMMARS = 32
"""An agent has the same tools in every request."""
_SECONDS_PER_CHAR = 10e-6
_SECONDS_PER_GRAMMAR = 0.05
"""A short one may stand for a pattern of 32 KiB."""
_MAX_NAME = 64
_HASH_CHARS = 8
_TOP = "functions"
"""The namespace that stands for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnName:
    """A tool as the client knows it."""

    name: str
    namespace: str = ""
    type: str = "function"


class Tools:
    """The tools of one request."""

    def __init__(self, given: Sequence[schema.Tool], items: Sequence[schema.Item] = ()) -> None:
        """Convert the request's tools, and those of ``items``; schemas stay as they were written.

        Raises:
            ServingError: one isn't the client's to run, or has a grammar that can't be kept.
        """
        self.told: list[Tool] = []
        """What the model is told of."""
        self.paths: list[str] = []
        """Where each of ``told`` is in the body."""
        self.shown: list[dict[str, Any]] = []
        """What the response says of them; without those that were left out."""
        self._own: dict[str, OwnName] = {}
        for index, tool in enumerate(given):
            self._add_any(tool, f"tools[{index}]")
            if not tool.type.startswith(schema.LEFT_OUT):
                self.shown.append(_shown(tool))
        for at, item in enumerate(items):
            for index, tool in enumerate(item.tools or ()):
                self._add_any(tool, f"input[{at}].tools[{index}]", found=True)

    def _add_any(self, tool: schema.Tool, path: str, *, found: bool = False) -> None:
        """Add a tool or a namespace; what was ``found`` may be there already."""
        if tool.type == "namespace":
            for index, each in enumerate(tool.tools or ()):
                self._add(each, f"{path}.tools[{index}]", tool.name, found=found)
        elif not tool.type.startswith(schema.LEFT_OUT):
            self._add(tool, path, found=found)

    def _add(self, tool: schema.Tool, path: str, namespace: str = "", *, found: bool) -> None:
        if tool.type not in TYPES or (tool.type == SEARCH and tool.execution != "client"):
            sentence = f"{tool.type[:64]!r}: this server runs no tools, clients do"
            raise UnsupportedFeatureError.of(f"{path}.type", sentence)
        (name,) = told_names(tool, namespace)
        if found and name in self._own:
            return
        if len(self.told) >= MAX_TOOLS:
            raise InvalidRequestError.of("tools", f"at most {MAX_TOOLS} tools")
        stop_if_gone()
        told = _custom(name, tool, path) if tool.type == "custom" else _function(name, tool)
        self.told.append(told)
        self.paths.append(path)
        self._own[name] = OwnName(name=tool.name, namespace=namespace, type=tool.type)

    def field(self, index: int, name: str) -> str:
        """Return where the field ``name`` of one of ``told`` is in the body."""
        if name == "strict" and self.own(self.told[index].name).type == "custom":
            name = "format"  # it has a grammar, which is always kept
        return f"{self.paths[index]}.{name}"

    def own(self, name: str) -> OwnName:
        """Return what the client calls a tool that the model has called."""
        return self._own.get(name) or OwnName(name=name)

    def named(self, choice: schema.ToolChoice, field: str) -> str:
        """Return the model's name of the tool that a choice names.

        Raises:
            InvalidRequestError: there is none.
        """
        for told, own in self._own.items():
            if own.name == choice.name and choice.namespace in (None, own.namespace):
                return told
        raise InvalidRequestError.of(f"{field}.name", "is none of tools")

    def only(self, names: Sequence[str]) -> None:
        """Tell the model of these tools alone."""
        kept = [index for index, tool in enumerate(self.told) if tool.name in names]
        self.told = [self.told[index] for index in kept]
        self.paths = [self.paths[index] for index in kept]


def _function(name: str, tool: schema.Tool) -> Tool:
    parameters = schema_text(bytes(tool.parameters))
    return Tool(name, tool.description or "", parameters, bool(tool.strict))


def _custom(name: str, tool: schema.Tool, path: str) -> Tool:
    """Make the function with one text; of a grammar, a pattern of the text that is always kept."""
    text, description, form = {"type": "string"}, tool.description or "", tool.format
    has_grammar = form is not None and form.type == "grammar"
    if form is not None and has_grammar:
        text["pattern"] = _checked_pattern(form, f"{path}.format")
        head = f"{_ARGUMENT} has to match this {form.syntax} grammar:"
        description = f"{description}\n{head}\n{form.definition}"
    parameters = {
        "type": "object",
        "properties": {_ARGUMENT: text},
        "required": [_ARGUMENT],
        "additionalProperties": False,
    }
    return Tool(name, description, json.dumps(parameters), has_grammar)


def _checked_pattern(form: schema.InputFormat, path: str) -> str:
    syntax, definition = form.syntax, form.definition
    for field, value in (("syntax", syntax), ("definition", definition)):
        if not value:
            raise InvalidRequestError.of(f"{path}.{field}", "is missing")
    if len(definition or "") > _MAX_GRAMMAR:
        sentence = f"must not exceed {_MAX_GRAMMAR} characters"
        raise InvalidRequestError.of(f"{path}.definition", sentence)
    try:
        return _pattern(syntax or "", definition or "")
    except UnconstrainableError as error:
        raise UnsupportedFeatureError.of(f"{path}.definition", str(error)) from error


@lru_cache(maxsize=_KEPT_GRAMMARS)
def _pattern(syntax: str, definition: str) -> str:
    return lark_pattern(definition) if syntax == "lark" else rewritten(definition)


def grammar_seconds(given: Sequence[schema.Tool]) -> float:
    """Return about how long the grammars of tools take to be read."""
    tools = [each for tool in given for each in (tool, *(tool.tools or ()))]
    chars = [
        len(tool.format.definition) for tool in tools if tool.format and tool.format.definition
    ]
    return sum(chars) * _SECONDS_PER_CHAR + len(chars) * _SECONDS_PER_GRAMMAR


def told_names(tool: schema.Tool, namespace: str = "") -> list[str]:
    """Return what a model calls a tool, or the tools of a namespace."""
    if tool.type == "namespace":
        return [told_name(each.name, tool.name) for each in tool.tools or ()]
    return [SEARCH if tool.type == SEARCH else told_name(tool.name, namespace)]


def told_name(name: str, namespace: str) -> str:
    """Return what a model calls a tool: the same in every request, and short enough."""
    if namespace in {"", _TOP}:
        return name
    joined = f"{namespace.rstrip('_')}__{name}"
    if len(joined) <= _MAX_NAME:
        return joined
    end = hashlib.sha256(joined.encode()).hexdigest()[:_HASH_CHARS]
    return f"{joined[: _MAX_NAME - _HASH_CHARS - 1]}_{end}"


def _shown(tool: schema.Tool) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": tool.type, "name": tool.name, "description": tool.description}
    if tool.type == "function":
        shown |= {"parameters": tool.parameters, "strict": bool(tool.strict)}
    elif tool.type == "custom":
        shown["format"] = tool.format or schema.InputFormat("text")
    elif tool.type == "namespace":
        shown["tools"] = [_shown(each) for each in tool.tools or ()]
    elif tool.type == SEARCH:
        del shown["name"]
        shown |= {"execution": tool.execution, "parameters": tool.parameters}
    return shown


# ---- a custom tool's input -----------------------------------------------------------------------

_BEGIN = re.compile(rf'\s*\{{\s*"{_ARGUMENT}"\s*:\s*"')
_CHARS = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_LONGEST_BEGIN = 256
"""If more has come, the text isn't looked for any more: `finish` reads all at once."""
_MOST_HELD = 12
"""Characters of a pair of surrogates: if more is held back, it can't be read at all."""
_CUT_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


def arguments_of(text: str) -> str:
    """Return the arguments of a call of a custom tool."""
    return json.dumps({_ARGUMENT: text}, ensure_ascii=False)


class CustomInput:
    """Reads the text of a custom tool out of its call's arguments, in pieces of any size."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._json: list[str] = []
        """What has come before the text has begun."""
        self._held = ""
        """What can't be read without what follows."""
        self._begun = self._ended = False

    def push(self, piece: str) -> str:
        """Return the new text."""
        if self._ended:
            return ""
        if not self._begun:
            self._json.append(piece)
            if len(self._held) > _LONGEST_BEGIN:
                return ""
        self._held += piece
        if not self._begun:
            begin = _BEGIN.match(self._held)
            if begin is None:
                return ""
            self._begun, self._held = True, self._held[begin.end() :]
        found = _CHARS.match(self._held)
        chars = found[0] if found else ""
        left = len(self._held) - len(chars)
        self._ended = left > _MOST_HELD or self._held.startswith('"', len(chars))
        if (cut := _CUT_PAIR.search(chars)) is not None:
            chars = chars[: cut.start()]
        self._held = self._held[len(chars) :]
        return _unescaped(chars)

    def finish(self) -> str:
        """Return the rest. Arguments that aren't what the tool takes are its text as they are."""
        if self._begun:
            return ""
        written = "".join(self._json)
        try:
            (value,) = msgspec.json.decode(written, type=dict[str, str]).values()
        except (msgspec.DecodeError, ValueError):
            return written
        return value


def _unescaped(chars: str) -> str:
    text: str = json.loads(f'"{chars}"', strict=False)
    # Half a pair of surrogates can't be sent.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
