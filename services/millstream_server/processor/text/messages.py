"""A conversation and its tools, as plain data and in the shape chat templates expect."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

_NO_PARAMETERS = {"type": "object", "properties": {}}


class ChatRole(enum.Enum):
    """Who speaks; the values are the names chat templates use."""

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

    ``role`` None stands for a role this server does not know; `check_messages` refuses it.
    ``tool_call_id`` is set on TOOL messages only: the call they answer.
    """

    role: ChatRole | None
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. An empty schema means that it takes no parameters."""

    name: str
    description: str
    parameters_json_schema: str


def message_for_template(message: ChatMessage, *, knows_developer: bool) -> dict[str, Any]:
    """Shape a checked message as Hugging Face templates expect it.

    Keys without a value are left out: templates test for them with ``is defined``. DEVELOPER
    becomes "system" for templates that never heard of it; most would print the role's name as it
    is, and the model was never trained on it.
    """
    role = message.role
    if role is None:
        raise ValueError("the message has no role: it was not checked")
    if role is ChatRole.DEVELOPER and not knows_developer:
        role = ChatRole.SYSTEM
    shaped: dict[str, Any] = {"role": role.value, "content": message.text}
    if message.name:
        shaped["name"] = message.name
    if message.tool_call_id:
        shaped["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        shaped["tool_calls"] = [_tool_call_for_template(call) for call in message.tool_calls]
    return shaped


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
