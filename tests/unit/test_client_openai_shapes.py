"""Messages and tools that are written as for OpenAI's chat API."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.v1 import chat_pb2, processor_pb2
from millstream_client import Image, MediaMessage, assistant, system, tool_result, user
from millstream_client.openai_shapes import tool_choice, tools
from millstream_client.requests import messages, tokenize_request

_WEATHER = {"name": "weather", "description": "The weather.", "parameters": {"type": "object"}}


def test_a_conversation_of_dicts() -> None:
    call = {"name": "weather", "arguments": "{}"}
    said = messages(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
            {"role": "assistant", "content": "Hello", "refusal": None, "reasoning": "Hm."},
            user("and mixed"),
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ]
    )
    named = user("Hi")
    assert isinstance(named, chat_pb2.ChatMessage)
    named.name = "Ann"
    thought = assistant("Hello")
    thought.reasoning = "Hm."
    called = chat_pb2.ChatMessage(
        role=chat_pb2.CHAT_ROLE_ASSISTANT,
        tool_calls=[chat_pb2.ToolCall(id="1", name="weather", arguments_json="{}")],
    )
    assert said == [
        *(system("Be short."), named, thought, user("and mixed")),
        *(called, tool_result("1", "rain")),
    ]
    request = tokenize_request(
        [{"role": "user", "content": "Hi"}], model="", tools=[_WEATHER], special_tokens=True
    )
    assert request.conversation.messages[0] == user("Hi")
    assert request.conversation.tools[0].name == "weather"


def test_an_image_is_one_of_the_message() -> None:
    place = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    (message,) = messages([{"role": "user", "content": [place, {"type": "text", "text": "?"}]}])
    assert isinstance(message, MediaMessage)
    assert message.content == (Image("data:image/png;base64,AA"), "?")


@pytest.mark.parametrize("given", [_WEATHER, {"type": "function", "function": _WEATHER}])
def test_a_tool_as_a_dict(given: dict[str, Any]) -> None:
    (tool,) = tools([given])
    assert (tool.name, tool.description) == ("weather", "The weather.")
    assert tool.parameters_json_schema == '{"type": "object"}'


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"role": "function", "content": "x"}, "role 'function' is none of system, developer,"),
        ({"role": "user", "content": "x", "audio": {"id": "1"}}, "'audio' of a message can't be"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "a part of type 'input_audio'"),
    ],
)
def test_what_a_message_cannot_have_is_said(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        messages([given])


def test_another_kind_of_tool_is_refused() -> None:
    with pytest.raises(ValueError, match="only functions can"):
        tools([{"type": "web_search"}])


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_tool_may_be_strict(strict: object) -> None:
    (tool,) = tools([{"function": {**_WEATHER, "strict": strict}}])
    assert tool.strict is bool(strict)


@pytest.mark.parametrize(
    ("given", "mode", "name"),
    [
        ("auto", "AUTO", ""),
        ("none", "NONE", ""),
        ("required", "REQUIRED", ""),
        ("weather", "NAMED", "weather"),
        ({"type": "function", "function": {"name": "weather"}}, "NAMED", "weather"),
        ({"type": "function", "name": "weather"}, "NAMED", "weather"),
    ],
)
def test_a_choice_of_tools(given: Any, mode: str, name: str) -> None:
    wanted = processor_pb2.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{mode}")
    assert tool_choice(given) == processor_pb2.ToolChoice(mode=wanted, name=name)
    assert tool_choice(tool_choice(given)) == tool_choice(given)


def test_a_choice_of_a_tool_that_is_no_function() -> None:
    with pytest.raises(ValueError, match="of type 'mcp' can't be used"):
        tool_choice({"type": "mcp"})
