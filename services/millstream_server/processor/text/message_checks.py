"""Checks of a conversation; each violation has its field's path."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from millstream_server.processor.text.json_checks import (
    SchemaSize,
    object_problem,
    schema_problem,
    schema_size,
)
from millstream_server.processor.text.messages import ChatMessage, ChatRole, Tool, ToolCall
from millstream_server.processor.text.threads import stop_if_gone
from millstream_server.runtime.errors import FieldViolation
from millstream_server.runtime.json_bounds import MAX_SUBSCHEMAS

MAX_VIOLATIONS = 16
MAX_TOOLS = 128
MAX_PATTERN_CHARS = 64 << 10
"""Of all regular expressions in a request's tools: checking them takes 0.2 s at the worst."""

_CHECKED_AT_ONCE = 32
_MEDIA_ROLES = frozenset({ChatRole.USER, ChatRole.TOOL})
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME_RULE = "must match ^[A-Za-z0-9_-]{1,64}$"


@dataclass(frozen=True, slots=True)
class ConversationPaths:
    """The paths of a conversation's parts in the client's message."""

    messages: str = "messages"
    tools: str = "tools"


DEFAULT_PATHS = ConversationPaths()


def check_messages(
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    paths: ConversationPaths = DEFAULT_PATHS,
) -> tuple[FieldViolation, ...]:
    """Return the violations, at most `MAX_VIOLATIONS`.

    The template decides which roles may follow each other: models differ. Two rules are ours. The
    last message is not ASSISTANT's: templates would close it and open an empty turn; Complete
    continues a text. And a TOOL message refers to an earlier call.

    Takes milliseconds for large schemas on first use: don't call it on the event loop then.
    """
    found = _check_conversation(messages, paths)
    if tools:
        found = chain(found, _check_tools(tools, paths.tools))
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
        yield from _check_message(path, message, calls_so_far)
        calls_so_far.update(call.id for call in message.tool_calls)
    if messages[-1].role is ChatRole.ASSISTANT:
        yield FieldViolation(
            f"{messages[-1].field or f'{paths.messages}[{len(messages) - 1}]'}.role",
            "the last message must not be ASSISTANT's; use Complete to go on with a text",
        )


def _is_plain(message: ChatMessage) -> bool:
    """Return whether it is text alone of a role that anything may follow, as most are."""
    role = message.role
    return (
        role is not None
        and role is not ChatRole.TOOL
        and not (message.parts or message.name or message.tool_call_id or message.tool_calls)
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
    if (problem := object_problem(call.arguments_json)) is not None:
        yield FieldViolation(f"{path}.arguments_json", problem)


def _check_tools(tools: Sequence[Tool], field: str) -> Iterator[FieldViolation]:
    if len(tools) > MAX_TOOLS:
        yield FieldViolation(field, f"at most {MAX_TOOLS} tools, not {len(tools)}")
        return
    size = SchemaSize()
    for tool in tools:
        stop_if_gone()
        size += schema_size(tool.parameters_json_schema)
    if size.parts > MAX_SUBSCHEMAS:
        yield FieldViolation(field, f"schemas with more than {MAX_SUBSCHEMAS} parts in all")
        return
    if size.pattern_chars > MAX_PATTERN_CHARS:
        sentence = f"regular expressions with more than {MAX_PATTERN_CHARS} characters in all"
        yield FieldViolation(field, sentence)
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
