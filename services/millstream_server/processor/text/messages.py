"""A conversation and its tools: as plain data, checked, and in the shape chat templates expect."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from millstream_server.media.items import Modality
from millstream_server.runtime.errors import FieldViolation
from millstream_server.runtime.frozen import dataclass
from millstream_server.runtime.json_bounds import (
    MAX_JSON_BYTES,
    MAX_SUBSCHEMAS,
    count_parts,
    read_object,
    read_schema,
)
from millstream_server.runtime.work.pool import stop_if_gone

MAX_VIOLATIONS = 16
MAX_TOOLS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 16_384
"""Of all messages together, calls included: a part may be two bytes in what was sent, and each is
an object."""
_CHECKED_AT_ONCE = 32
_KEPT_SCHEMAS = 256
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME_RULE = "must match ^[A-Za-z0-9_-]{1,64}$"
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
    """An assistant's request to run a tool.

    ``arguments_json`` is a JSON object, unless the call was cut or malformed.
    """

    id: str
    name: str
    arguments_json: str


@dataclasses.dataclass(slots=True, eq=False)
class MediaPart:
    """An image or a video as a client sent it; later turns need its bytes again."""

    modality: Modality
    field: str
    """Path of the part in the client's message, for errors."""
    data: bytes = b""
    """The file; empty until ``url`` was fetched, or ``pieces`` were joined."""
    url: str = ""
    upload_id: str | None = None
    """Which of the conversation's uploads it is: `Conversation.add` puts in its ``pieces``."""
    pieces: Sequence[bytes] = ()
    """The file as it was uploaded, until it is joined."""
    sha256: bytes = b""
    """Of ``data``; empty until it was checked."""


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
    reasoning: str = ""
    """ASSISTANT only."""
    own: bool = False
    """It is an answer of this conversation: its calls need no check."""

    @property
    def media(self) -> tuple[MediaPart, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))

    def continued(self, answer: ChatMessage) -> ChatMessage:
        """Return this message, in which ``answer`` goes on, as one."""
        return dataclasses.replace(
            answer,
            text=self.text + answer.text,
            reasoning=self.reasoning + answer.reasoning,
            name=self.name,
            own=True,
        )


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. An empty schema means that it takes no parameters."""

    name: str
    description: str
    parameters_json_schema: str
    strict: bool = False
    """The arguments of its calls fit the schema."""


# ---- checks; each violation has its field's path -------------------------------------------------

_MEDIA_ROLES = frozenset({ChatRole.USER, ChatRole.TOOL})


@dataclass(frozen=True, slots=True)
class ConversationPaths:
    """The paths of a conversation's parts in the client's message."""

    messages: str = "messages"
    tools: str = "tools"
    continues: str = ""
    """Path of what asks to go on in the last message, which is ASSISTANT's then; empty: nothing."""


DEFAULT_PATHS = ConversationPaths()


def check_messages(
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    paths: ConversationPaths = DEFAULT_PATHS,
) -> tuple[FieldViolation, ...]:
    """Return the violations, at most `MAX_VIOLATIONS`.

    The template decides which roles may follow each other: models differ. Two rules are ours. The
    last message has no tool calls, since their results would be missing. And a TOOL message refers
    to an earlier call.

    Takes milliseconds for large schemas on first use: don't call it on the event loop then.
    """
    found = _check_conversation(messages, paths)
    if tools:
        found = chain(found, check_tools(tools, paths.tools))
    return tuple(islice(found, MAX_VIOLATIONS))


def _check_conversation(
    messages: Sequence[ChatMessage], paths: ConversationPaths
) -> Iterator[FieldViolation]:
    if not messages:
        yield FieldViolation(paths.messages, "must not be empty")
        return
    calls_so_far: set[str] = set()
    for index, message in enumerate(messages):
        if index % _CHECKED_AT_ONCE == _CHECKED_AT_ONCE - 1:
            stop_if_gone()
        if _is_plain(message):
            continue
        path = message.field or f"{paths.messages}[{index}]"
        if not message.own:
            yield from _check_message(path, message, calls_so_far)
        calls_so_far.update(call.id for call in message.tool_calls)
    yield from _check_last(messages[-1], f"{paths.messages}[{len(messages) - 1}]", paths)


def _check_last(
    message: ChatMessage, at: str, paths: ConversationPaths
) -> Iterator[FieldViolation]:
    is_models, calls = message.role is ChatRole.ASSISTANT, message.tool_calls
    if paths.continues and not is_models:
        yield FieldViolation(paths.continues, "the last message must be ASSISTANT's")
    if is_models and calls:
        last = f"{message.field or at}.tool_calls[{len(calls) - 1}]"
        yield FieldViolation(last, "calls can't be in the last message; send their results, too")


def _is_plain(message: ChatMessage) -> bool:
    """Return whether it is text alone of a role that anything may follow, as most are."""
    role = message.role
    return (
        role is not None
        and role is not ChatRole.TOOL
        and not (message.parts or message.name or message.tool_call_id or message.tool_calls)
        and not message.reasoning
    )


def _check_message(
    path: str, message: ChatMessage, calls_so_far: set[str]
) -> Iterator[FieldViolation]:
    if message.role is None:
        known = ", ".join(f"CHAT_ROLE_{role.name}" for role in ChatRole)
        yield FieldViolation(f"{path}.role", f"must be one of {known}")
        return
    if message.parts and message.role not in _MEDIA_ROLES:
        yield FieldViolation(
            message.media[0].field, "only USER and TOOL messages may have images and videos"
        )
    if message.name and not _NAME.fullmatch(message.name):
        yield FieldViolation(f"{path}.name", _NAME_RULE)
    yield from _check_tool_answer(f"{path}.tool_call_id", message, calls_so_far)
    if message.reasoning and message.role is not ChatRole.ASSISTANT:
        yield FieldViolation(f"{path}.reasoning", "only ASSISTANT messages have reasoning")
    if message.tool_calls and message.role is not ChatRole.ASSISTANT:
        yield FieldViolation(f"{path}.tool_calls", "only ASSISTANT messages have tool calls")
        return
    ids: set[str] = set()
    for index, call in enumerate(message.tool_calls):
        yield from _check_tool_call(f"{path}.tool_calls[{index}]", call, ids)
        ids.add(call.id)


def _check_tool_answer(
    path: str, message: ChatMessage, calls_so_far: set[str]
) -> Iterator[FieldViolation]:
    if message.role is not ChatRole.TOOL:
        if message.tool_call_id:
            yield FieldViolation(path, "only TOOL messages answer a tool call")
    elif not message.tool_call_id:
        yield FieldViolation(path, "a TOOL message must name the tool call it answers")
    elif calls_so_far and message.tool_call_id not in calls_so_far:
        # Without any structured call before, the call is in an assistant's text, in the model's
        # own notation: then the id isn't checked.
        yield FieldViolation(path, "no earlier ASSISTANT message has a tool call with this id")


def _check_tool_call(path: str, call: ToolCall, ids: set[str]) -> Iterator[FieldViolation]:
    if not call.id:
        yield FieldViolation(f"{path}.id", "must not be empty")
    elif call.id in ids:
        yield FieldViolation(f"{path}.id", "must differ from the other calls' of its message")
    if not _NAME.fullmatch(call.name):
        yield FieldViolation(f"{path}.name", _NAME_RULE)
    text = call.arguments_json
    if len(text) > MAX_JSON_BYTES or len(text.encode()) > MAX_JSON_BYTES:
        sentence = f"must not exceed {MAX_JSON_BYTES // 1024} KiB"
        yield FieldViolation(f"{path}.arguments_json", sentence)


def check_tools(tools: Sequence[Tool], field: str) -> Iterator[FieldViolation]:
    """Yield the violations; it takes milliseconds for large schemas on first use."""
    if len(tools) > MAX_TOOLS:
        yield FieldViolation(field, f"at most {MAX_TOOLS} tools, not {len(tools)}")
        return
    parts = 0
    for tool in tools:
        stop_if_gone()
        parts += _schema_parts(tool.parameters_json_schema)
    if parts > MAX_SUBSCHEMAS:
        yield FieldViolation(field, f"schemas with more than {MAX_SUBSCHEMAS} parts in all")
        return
    names: set[str] = set()
    for index, tool in enumerate(tools):
        stop_if_gone()
        path = f"{field}[{index}]"
        if not _NAME.fullmatch(tool.name):
            yield FieldViolation(f"{path}.name", _NAME_RULE)
        elif tool.name in names:
            yield FieldViolation(f"{path}.name", "must differ from the other tools' names")
        names.add(tool.name)
        schema = tool.parameters_json_schema
        if schema and (problem := schema_problem(schema)) is not None:
            yield FieldViolation(f"{path}.parameters_json_schema", problem)


# Cached: a conversation has the same tools in every turn, and a large schema takes milliseconds.
@lru_cache(maxsize=_KEPT_SCHEMAS)
def schema_problem(text: str) -> str | None:
    """Return why ``text`` can't be a tool's JSON Schema, or None.

    Size, depth and parts are bounded, and it refers to nothing outside. Nothing else is checked:
    it goes to the template only, and nothing is matched with it.
    """
    return read_schema(text)[0]


@lru_cache(maxsize=_KEPT_SCHEMAS)
def _schema_parts(text: str) -> int:
    return count_parts(read_object(text)[1]) if text else 0


# ---- for templates -------------------------------------------------------------------------------


def message_for_template(
    message: ChatMessage, *, supports_developer: bool, reasoning: str = "reasoning_content"
) -> dict[str, Any]:
    """Shape a checked message as Hugging Face templates expect it.

    Keys without a value are left out: templates test for them with ``is defined``. DEVELOPER
    becomes "system" for templates without that role; most would print the role's name, on which the
    model was not trained. ``reasoning`` is the template's name for it.
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
    if message.reasoning:
        shaped[reasoning] = message.reasoning
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
        "function": {"name": call.name, "arguments": _arguments(call.arguments_json)},
    }


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments; what is no JSON object, as of a call that was cut, is in one."""
    problem, found = read_object(text, max_bytes=sys.maxsize)
    return found if problem is None or text.strip() in ("", "null") else {"input": text}
