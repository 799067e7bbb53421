"""A conversation and its tools, as plain data and in the shape chat templates expect."""

from __future__ import annotations

import enum
import json
from typing import Any

from millstream_server.processor.media.parts import MediaPart
from millstream_server.runtime.frozen import dataclass

_NO_PARAMETERS = {"type": "object", "properties": {}}


class ChatRole(enum.Enum):
    """The author of a message; the values are the names in chat templates."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An assistant's request to run a tool. ``arguments_json`` is a JSON object."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message.

    ``role`` None is an unknown role, which `check_messages` refuses.
    ``tool_call_id`` is set on TOOL messages only: the call they answer.
    """

    role: ChatRole | None
    text: str
    """The message's text; in a message with media, of all its text parts."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    field: str = ""
    """Path of the message in the request; empty: not from a client, or checked already."""
    parts: tuple[str | MediaPart, ...] = ()
    """A message with media: its parts in order; empty for text alone."""

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """Its images and videos, in order."""
        return tuple(part for part in self.parts if not isinstance(part, str))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. An empty schema means that it takes no parameters."""

    name: str
    description: str
    parameters_json_schema: str


def message_for_template(message: ChatMessage, *, supports_developer: bool) -> dict[str, Any]:
    """Shape a checked message as Hugging Face templates expect it.

    Keys without a value are left out: templates test for them with ``is defined``. DEVELOPER
    becomes "system" for templates without that role; most would print the role's name, on which the
    model was not trained.
    """
    role = message.role
    if role is None:
        raise ValueError("the message has no role: it was not checked")
    if role is ChatRole.DEVELOPER and not supports_developer:
        role = ChatRole.SYSTEM
    content: Any = message.text
    if message.parts:
        content = [_part_for_template(part) for part in message.parts]
    shaped: dict[str, Any] = {"role": role.value, "content": content}
    if message.name:
        shaped["name"] = message.name
    if message.tool_call_id:
        shaped["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        shaped["tool_calls"] = [_tool_call_for_template(call) for call in message.tool_calls]
    return shaped


def _part_for_template(part: str | MediaPart) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": part.modality.value}


def tool_for_template(tool: Tool) -> dict[str, Any]:
    """Shape a checked tool as Hugging Face templates expect it."""
    schema = tool.parameters_json_schema
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": json.loads(schema) if schema else _NO_PARAMETERS,
        },
    }


def _tool_call_for_template(call: ToolCall) -> dict[str, Any]:
    # Templates print arguments with `tojson`, or item by item: they need the object, not its text.
    return {
        "type": "function",
        "id": call.id,
        "function": {"name": call.name, "arguments": json.loads(call.arguments_json)},
    }
