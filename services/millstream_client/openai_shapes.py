"""Messages and tools as dicts, in the shape of OpenAI's chat API, read as the contract's.

What can't be sent raises an error that says what to write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millstream.v1 import chat_pb2, processor_pb2
from millstream_client.functions import Function, as_function
from millstream_client.media import Image, Part, Video

_ROLES = {
    name.removeprefix("CHAT_ROLE_").lower(): role
    for name, role in chat_pb2.ChatRole.items()
    if role
}
_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning")
_TOOL = ("name", "description", "parameters", "strict")
_MEDIA: Mapping[str, type[Image | Video]] = {"image_url": Image, "video_url": Video}
Tool = chat_pb2.ChatTool | Mapping[str, Any] | Callable[..., Any] | Function
"""A tool, a dict in OpenAI's shape, or a Python function."""
ToolChoice = processor_pb2.ToolChoice | Mapping[str, Any] | str
"""``"auto"``, ``"none"``, ``"required"``, a tool's name, or a dict in OpenAI's shape."""
_MODES = {
    name.removeprefix("TOOL_CHOICE_MODE_").lower(): mode
    for name, mode in processor_pb2.ToolChoiceMode.items()
    if mode not in (0, processor_pb2.TOOL_CHOICE_MODE_NAMED)
}
_REASONING = ("reasoning", "reasoning_content")


def message_fields(given: Any) -> dict[str, Any]:
    """Read a message: ``role``, ``content`` as parts, ``tool_calls``, ``reasoning`` and so on.

    Raises:
        ValueError: it has something that can't be sent.
        TypeError: it is no dict, or a value has the wrong type.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"a list of messages has a {type(given).__name__}; see user()")
    _check(given, _MESSAGE, "a message", ignored=_REASONING)
    role = _ROLES.get(given.get("role", ""))
    if role is None:
        raise ValueError(f"role {given.get('role')!r} is none of {', '.join(_ROLES)}")
    return {
        "role": role,
        "content": tuple(_parts(given.get("content"))),
        "tool_calls": tuple(_tool_call(call) for call in given.get("tool_calls") or ()),
        "tool_call_id": given.get("tool_call_id") or "",
        "name": given.get("name") or "",
        "reasoning": next(filter(None, map(given.get, _REASONING)), ""),
    }


def tools(given: Sequence[Tool]) -> list[chat_pb2.ChatTool]:
    """Read tools.

    Raises:
        ValueError: one has something that can't be sent.
        TypeError: one is no tool, or a function that no schema can be made of.
    """
    return [*map(_tool, given)]


def tool_choice(given: ToolChoice) -> processor_pb2.ToolChoice:
    """Read which tool the model may, or must, call.

    Raises:
        ValueError: it isn't known.
    """
    if isinstance(given, processor_pb2.ToolChoice):
        return given
    if isinstance(given, str) and given in _MODES:
        return processor_pb2.ToolChoice(mode=_MODES[given])
    name: str = given if isinstance(given, str) else _chosen(given)
    return processor_pb2.ToolChoice(mode=processor_pb2.TOOL_CHOICE_MODE_NAMED, name=name)


def _chosen(given: Mapping[str, Any]) -> str:
    if (kind := given.get("type", "function")) != "function":
        raise ValueError(f"a tool_choice of type {kind!r} can't be used: name a function")
    name: str = given.get("function", given)["name"]
    return name


def _parts(content: Any) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [_part(part) for part in content]


def _part(given: Any) -> Part:
    if isinstance(given, Part):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"a part is a text, an Image, a Video or a dict: {type(given).__name__}")
    kind = str(given.get("type"))
    if kind in ("text", "input_text", "output_text"):
        return str(given["text"])
    if kind not in _MEDIA:
        raise ValueError(
            f"a part of type {kind!r} can't be sent: write text, image_url or video_url"
        )
    place = given[kind]
    return _MEDIA[kind](place["url"] if isinstance(place, Mapping) else place)


def _tool_call(given: Mapping[str, Any]) -> chat_pb2.ToolCall:
    called = given["function"]
    arguments = called["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return chat_pb2.ToolCall(id=given.get("id", ""), name=called["name"], arguments_json=arguments)


def _tool(given: Any) -> chat_pb2.ChatTool:
    if isinstance(given, chat_pb2.ChatTool):
        return given
    if (function := as_function(given)) is not None:
        return function.tool
    if not isinstance(given, Mapping):
        raise TypeError(
            f"a tool is a function, a ChatTool, or a dict as OpenAI's: not {type(given).__name__}"
        )
    if given.get("type", "function") != "function":
        raise ValueError(f"a tool of type {given['type']!r} can't be used: only functions can")
    described = given.get("function")
    if described is None:
        described = {key: value for key, value in given.items() if key != "type"}
    _check(described, _TOOL, "a tool")
    parameters = described.get("parameters")
    return chat_pb2.ChatTool(
        name=described["name"],
        description=described.get("description") or "",
        parameters_json_schema=json.dumps(parameters) if parameters else "",
        strict=bool(described.get("strict")),
    )


def _check(
    given: Mapping[str, Any], known: Sequence[str], what: str, ignored: Sequence[str] = ()
) -> None:
    """Refuse keys that would be lost; dumps of OpenAI's objects have empty ones, which may be."""
    for key, value in given.items():
        if key not in known and key not in ignored and value:
            raise ValueError(f"{key!r} of {what} can't be sent: write {', '.join(known)}")
