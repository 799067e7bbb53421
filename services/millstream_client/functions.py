"""Python functions as tools: their schema from signature and docstring, and calls of them.

Of a docstring is read: the text before its first section, and what `Args:` (Google's style) or
`:param name:` (Sphinx's) says of a parameter. `Annotated[str, "a text"]` says it too, and wins.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from millstream.v1 import chat_pb2
from millstream_client.structured import Shape, shape_of

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECTION = re.compile(
    r"^(?:(?:Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$|:\w+)",
    re.MULTILINE,
)
_ARGS = re.compile(
    r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+\S.*\n?|[ \t]*\n)*)", re.MULTILINE
)
_IN_ARGS = re.compile(r"^(\w+)(?: *\([^)\n]*\))?:[ \t]*(.*(?:\n[ \t]+\S.*)*)", re.MULTILINE)
_SPHINX = re.compile(r"^:param (?:[^:\n]*[ \t])?(\w+):[ \t]*(.*(?:\n[ \t]+\S.*)*)", re.MULTILINE)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Function:
    """A function that the model may call.

    It is described by its signature and docstring, or by a ``tool`` that is given: then it is
    called with the arguments as they come, by name.
    """

    def __init__(self, function: Callable[..., Any], tool: chat_pb2.ChatTool | None = None) -> None:
        """Read what it takes.

        Raises:
            TypeError: it has no name that a tool may have, or a parameter that no schema can be
                made of.
        """
        self.call = function
        self._given = tool is not None
        self._shapes: dict[str, Shape] = {}
        self._required: list[str] = []
        self.tool = tool or self._read(function)

    def _read(self, function: Callable[..., Any]) -> chat_pb2.ChatTool:
        name = getattr(function, "__name__", "")
        if not _NAME.fullmatch(name):
            raise TypeError(
                f"{function!r} can't be a tool: a tool is a function with a name of letters, "
                "digits and _"
            )
        description, explained = read_docstring(inspect.getdoc(function) or "")
        properties: dict[str, Any] = {}
        hints = _hints(name, function)
        for parameter in inspect.signature(function).parameters.values():
            shape, text = _parameter(name, parameter, hints.get(parameter.name))
            self._shapes[parameter.name] = shape
            if parameter.default is parameter.empty:
                self._required.append(parameter.name)
            text = text or explained.get(parameter.name, "")
            properties[parameter.name] = {**shape.schema, **({"description": text} if text else {})}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if self._required:
            schema["required"] = self._required
        return chat_pb2.ChatTool(
            name=name,
            description=description,
            parameters_json_schema=json.dumps(schema, ensure_ascii=False),
        )

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make the function's arguments of a call's.

        Raises:
            ValueError: one is missing, unknown, or of another type.
        """
        if self._given:
            return dict(arguments)
        if missing := [name for name in self._required if name not in arguments]:
            raise ValueError(f"{self.tool.name} needs {', '.join(missing)}")
        if further := sorted(arguments.keys() - self._shapes.keys()):
            raise ValueError(f"{self.tool.name} takes no {', '.join(further)}")
        return {name: self._made(name, value) for name, value in arguments.items()}

    def _made(self, name: str, value: Any) -> Any:
        try:
            return self._shapes[name].make(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def functions_of(tools: typing.Iterable[Any]) -> dict[str, Function]:
    """Return those of some tools that are Python functions, by name.

    Raises:
        TypeError: one can't be a tool.
    """
    made = [function for tool in tools if (function := as_function(tool)) is not None]
    return {function.tool.name: function for function in made}


def as_function(tool: Any) -> Function | None:
    """Return a tool as a function; None: it is none.

    Raises:
        TypeError: it can't be a tool.
    """
    if isinstance(tool, Function):
        return tool
    return Function(tool) if callable(tool) else None


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"a type of {name} isn't known when it runs: {error}") from error


def _parameter(function: str, parameter: inspect.Parameter, hint: Any) -> tuple[Shape, str]:
    """Return a parameter's shape, and what its annotation says of it."""
    of = f"parameter {parameter.name!r} of {function}"
    if parameter.kind not in _NAMED:
        raise TypeError(f"{of}: a tool's parameters are named: no *args, **kwargs, or before a /")
    if hint is None:
        raise TypeError(f"{of} has no type: write {parameter.name}: str, for instance")
    text = ""
    if typing.get_origin(hint) is typing.Annotated:
        hint, *extras = typing.get_args(hint)
        text = next((extra for extra in extras if isinstance(extra, str)), "")
    try:
        return shape_of(hint), text
    except TypeError as error:
        raise TypeError(f"{of}: {error}") from error


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a clean docstring's description, and what it says of each parameter."""
    section = _SECTION.search(text)
    description = text[: section.start()] if section else text
    block = _ARGS.search(text)
    found = _IN_ARGS.findall(inspect.cleandoc("\n" + block.group(1))) if block else []
    found += _SPHINX.findall(text)
    return description.strip(), {name: " ".join(said.split()) for name, said in found}
