"""What is refused before a template sees it, field by field."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from typing import Any

import pytest

from millstream_server.processor.text.messages import (
    MAX_VIOLATIONS,
    ChatMessage,
    ChatRole,
    ConversationPaths,
    Tool,
    ToolCall,
    check_messages,
    message_for_template,
    schema_problem,
)
from millstream_server.runtime.json_bounds import MAX_JSON_BYTES, MAX_SUBSCHEMAS

USER = ChatMessage(ChatRole.USER, "Hello")
CALL = ToolCall("call-1", "weather", '{"city": "Bern"}')
ASKED = ChatMessage(ChatRole.ASSISTANT, "", tool_calls=(CALL,))
ANSWER = ChatMessage(ChatRole.TOOL, "rain", tool_call_id="call-1")
WEATHER = Tool("weather", "Look it up", '{"type": "object"}')


def fields(messages: list[ChatMessage], tools: list[Tool] | None = None) -> list[str]:
    return [violation.field for violation in check_messages(messages, tools or [])]


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [ChatMessage(ChatRole.SYSTEM, "Say hello.")],
        [ChatMessage(ChatRole.DEVELOPER, "Be brief."), USER],
        [ChatMessage(ChatRole.ASSISTANT, "Welcome."), USER],
        [USER, ASKED, ANSWER],
        [USER, ChatMessage(ChatRole.ASSISTANT, "Hi")],
        [USER, ChatMessage(ChatRole.ASSISTANT, "<call weather>"), ANSWER],
        [USER, ASKED, ANSWER, ChatMessage(ChatRole.ASSISTANT, "Rain."), USER, ASKED, ANSWER],
    ],
)
def test_conversations_that_make_sense_pass(messages: list[ChatMessage]) -> None:
    assert fields(messages, [WEATHER, Tool("now", "", "")]) == []


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (ChatMessage(ChatRole.ASSISTANT, "Let me s"), []),
        (USER, ["continues"]),
        (ASKED, ["messages[1].tool_calls[0]"]),
    ],
)
def test_only_a_message_of_the_models_without_calls_can_be_continued(
    last: ChatMessage, expected: list[str]
) -> None:
    paths = ConversationPaths(continues="continues")
    found = check_messages([USER, last], (), paths)
    assert [violation.field for violation in found] == expected


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], ["messages"]),
        ([ChatMessage(None, "Hello")], ["messages[0].role"]),
        (
            [USER, replace(ASKED, tool_calls=(CALL, replace(CALL, id="call-2")))],
            ["messages[1].tool_calls[1]"],
        ),
        ([replace(USER, name="no spaces")], ["messages[0].name"]),
        ([replace(USER, tool_calls=(CALL,))], ["messages[0].tool_calls"]),
        ([replace(USER, tool_call_id="call-1")], ["messages[0].tool_call_id"]),
        ([USER, ASKED, replace(ANSWER, tool_call_id="")], ["messages[2].tool_call_id"]),
        ([USER, ASKED, replace(ANSWER, tool_call_id="call-2")], ["messages[2].tool_call_id"]),
    ],
)
def test_messages_are_refused_by_field(messages: list[ChatMessage], expected: list[str]) -> None:
    assert fields(messages) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (replace(CALL, id=""), "id"),
        (replace(CALL, name=""), "name"),
        (replace(CALL, name="a.b"), "name"),
        (replace(CALL, arguments_json="é" * 33_000), "arguments_json"),
    ],
)
def test_tool_calls_are_refused_by_field(call: ToolCall, expected: str) -> None:
    messages = [USER, replace(ASKED, tool_calls=(call,)), USER]
    assert fields(messages) == [f"messages[1].tool_calls[0].{expected}"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", {}),
        (" null ", {}),
        ("[]", {"input": "[]"}),
        ('{"a": "b', {"input": '{"a": "b'}),
        ('{"a": NaN}', {"input": '{"a": NaN}'}),
        ('{"a": "\\ud800"}', {"input": '{"a": "\\ud800"}'}),
        ('{"a": ' + "9" * 5000 + "}", {"input": '{"a": ' + "9" * 5000 + "}"}),
        ('{"a":' * 33 + "1" + "}" * 33, {"input": '{"a":' * 33 + "1" + "}" * 33}),
        (json.dumps({"a": "b" * 100_000}), {"a": "b" * 100_000}),  # an answer of our own
    ],
)
def test_templates_get_an_object_of_any_arguments(arguments: str, shown: Any) -> None:
    call = replace(CALL, arguments_json=arguments)
    message = replace(ASKED, tool_calls=(call,))
    if len(arguments) < MAX_JSON_BYTES:
        assert fields([USER, message, ANSWER]) == []
    (found,) = message_for_template(message, supports_developer=True)["tool_calls"]
    assert found["function"]["arguments"] == shown


def test_call_ids_differ_within_a_message() -> None:
    messages = [USER, replace(ASKED, tool_calls=(CALL, CALL)), ANSWER]
    assert fields(messages) == ["messages[1].tool_calls[1].id"]


def test_tools_are_refused_by_field() -> None:
    tools = [
        WEATHER,
        WEATHER,
        replace(WEATHER, name="ü"),
        replace(WEATHER, name="other", parameters_json_schema="{"),
    ]
    assert fields([USER], tools) == [
        "tools[1].name",
        "tools[2].name",
        "tools[3].parameters_json_schema",
    ]
    assert fields([USER], [replace(WEATHER, name=f"t{n}") for n in range(129)]) == ["tools"]


def test_all_violations_come_at_once_up_to_a_bound() -> None:
    assert fields([ChatMessage(None, "")], [replace(WEATHER, name="")]) == [
        "messages[0].role",
        "tools[0].name",
    ]
    assert len(fields([ChatMessage(None, "")] * 1000)) == MAX_VIOLATIONS


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ('{"a": 1', "must be valid JSON"),
        ("true", "must be a JSON object"),
        ('{"$ref": "https://example.com/a.json"}', "must not refer outside itself"),
        ('{"items": [{"$ref": "file:///etc/passwd"}]}', "must not refer outside itself"),
        ('{"a":' * 33 + "{}" + "}" * 33, "must not nest deeper than 32"),
        ('{"a":' * 9000 + "{}" + "}" * 9000, "must not nest deeper than 32"),
        ('{"description": "' + "é" * 33_000 + '"}', "must not exceed 64 KiB"),
        (json.dumps({"anyOf": [True] * MAX_SUBSCHEMAS}), "must not have more than 4096 parts"),
    ],
)
def test_schemas_are_refused_with_a_sentence(schema: str, sentence: str) -> None:
    problem = schema_problem(schema)
    assert problem is not None
    assert sentence in problem


@pytest.mark.parametrize(
    "schema",
    [
        "{}",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}',
        '{"properties": {"$ref": {"type": "string"}}}',
        '{"a":' * 31 + "{}" + "}" * 31,
        # Nothing is matched with a schema, so neither JSON Schema nor regexes are checked.
        '{"type": "strin", "required": ["a", "a"], "properties": {"a": {"minimum": "1"}}}',
        '{"pattern": "(", "patternProperties": {"(?=b": {}}}',
        json.dumps({"pattern": "(?i)" + "[A-\uffff]" * 1000}),
    ],
)
def test_schemas_that_are_fine(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", None)
    assert schema_problem(schema) is None


def test_the_schemas_of_a_request_are_bounded_together() -> None:
    large = json.dumps({"anyOf": [True] * 1000})
    tools = [Tool(f"t{n}", "", large.replace("true", "true " + " " * n, 1)) for n in range(100)]
    assert fields([USER], tools) == ["tools"]
