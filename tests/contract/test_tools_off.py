"""Where no tool was given, or none may be called, a call's block is text, on every endpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from millstream.v1 import chat_pb2, generation_pb2, processor_pb2
from millstream_server.formats.parser import Parser
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import InProcessProcessor
from tests.support.clients.http_api import CHAT, ask
from tests.support.processor.chats import chat, options, start
from tests.support.processor.reading import CALL, TEMPLATE, reading_model, serving
from tests.support.processor.saying import saying

TEXT = f"Let me see.\n{CALL}\nSo."
SPOKEN = f"hm</think>\n\n{TEXT}"
Said = tuple[str, str, str]
"""Reasoning, text, and why it ended."""
FUNCTION: Any = {"name": "f", "parameters": {"type": "object"}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
EVENTS = processor_pb2.CHAT_OUTPUT_EVENTS
NONE = processor_pb2.ToolChoice(mode=processor_pb2.TOOL_CHOICE_MODE_NONE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """Its markers of calls are special tokens; switched off, its prompts end the reasoning."""
    template = TEMPLATE.replace(
        "no {% endif %}<think>", "<think></think>{% else %}<think>{% endif %}"
    )
    folder: Path = tmp_path_factory.mktemp("model")
    reading_model(folder, chat_template=template)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(file)
    return TextModel.load(folder)


@pytest_asyncio.fixture
async def front(model: TextModel) -> AsyncIterator[InProcessProcessor]:
    async with serving(model) as served:
        yield served


# ---- the endpoints: each says what came of one answer


async def chats(front: InProcessProcessor, **asked: Any) -> Said:
    body = {"messages": [{"role": "user", "content": "hi"}], **asked}
    (choice,) = (await ask(front.port, CHAT, body)).json["choices"]
    streamed = {"content": "", "reasoning": ""}
    for event in (await ask(front.port, CHAT, {**body, "stream": True})).events:
        for each in event["choices"]:
            for name in streamed:
                streamed[name] += each["delta"].get(name, "")
            assert "tool_calls" not in each["delta"]
    message = choice["message"]
    assert "tool_calls" not in message
    reasoning = message.get("reasoning", "")
    assert streamed == {"content": message["content"], "reasoning": reasoning}
    return reasoning, message["content"], choice["finish_reason"]


async def messages(front: InProcessProcessor, **asked: Any) -> Said:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500, **asked}
    found = (await ask(front.port, "/v1/messages", body)).json
    texts = {each["type"]: each.get("thinking", each.get("text")) for each in found["content"]}
    assert set(texts) <= {"thinking", "text"}
    streamed = await ask(front.port, "/v1/messages", {**body, "stream": True})
    assert b"tool_use" not in streamed.body
    return texts.get("thinking", ""), texts["text"], found["stop_reason"]


async def responses(front: InProcessProcessor, **asked: Any) -> Said:
    body = {"input": "hi", **asked}
    found = (await ask(front.port, "/v1/responses", body)).json
    texts = {each["type"]: each["content"][0]["text"] for each in found["output"]}
    assert set(texts) <= {"reasoning", "message"}
    streamed = await ask(front.port, "/v1/responses", {**body, "stream": True})
    assert b'"function_call"' not in streamed.body
    return texts.get("reasoning", ""), texts["message"], found["status"]


async def grpc_chat(front: InProcessProcessor, **asked: Any) -> Said:
    for step in range(2):
        answer = await chat(front.stub, "hi", output=EVENTS, opts=options(500), **asked)
        (choice,) = answer.choices.values()
        kinds = [event.WhichOneof("event") for event in choice.events]
        assert set(kinds) <= {"reasoning", "text"}
        assert all(
            getattr(event, kind or "") for event, kind in zip(choice.events, kinds, strict=True)
        )
        assert (answer.text, choice.tool_calls, step) == ("", [], step)
    reasoning = "".join(event.reasoning for event in choice.events)
    text = "".join(event.text for event in choice.events)
    return reasoning, text, generation_pb2.FinishReason.Name(answer.finish_reason)


async def connect(front: InProcessProcessor, **asked: Any) -> Said:
    chat_start = {
        "messages": [{"role": "CHAT_ROLE_USER", "content": [{"text": "hi"}]}],
        "output": "CHAT_OUTPUT_EVENTS",
        **asked,
    }
    sent = json.dumps({"start": chat_start}).encode()
    url = f"http://{front.address}/millstream.v1.ProcessorService/ChatOnce"
    async with httpx.AsyncClient() as client:
        for _ in range(2):
            response = await client.post(
                url,
                content=b"\0" + len(sent).to_bytes(4, "big") + sent,
                headers={"Content-Type": "application/connect+json"},
            )
    body, found, finish = response.content, {"reasoning": "", "text": ""}, ""
    while body:
        size = int.from_bytes(body[1:5], "big")
        message, body = json.loads(body[5 : 5 + size]), body[5 + size :]
        for choice in message.get("choices", ()):
            for event in choice.get("events", ()):
                ((kind, text),) = event.items()
                found[kind] += text
            finish = choice.get("finishReason", finish)
    return found["reasoning"], found["text"], finish


TOOLS: Any = [chat_pb2.ChatTool(name="f")]
OFF = processor_pb2.ReasoningOptions(enabled=False)
STOP = "FINISH_REASON_STOP"
_NO_THINKING: Any = {"chat_template_kwargs": {"enable_thinking": False}}
_MESSAGES_TOOLS: Any = {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}
_RESPONSES_TOOLS: Any = {"tools": [{"type": "function", **FUNCTION}]}
Door = Callable[..., Awaitable[Said]]
NO_TOOLS: list[tuple[Door, dict[str, Any], str]] = [
    (chats, {}, "stop"),
    (chats, {"tools": []}, "stop"),
    (chats, {"tools": CHAT_TOOLS, "tool_choice": "none"}, "stop"),
    (messages, {}, "end_turn"),
    (messages, {**_MESSAGES_TOOLS, "tool_choice": {"type": "none"}}, "end_turn"),
    (responses, {}, "completed"),
    (responses, {**_RESPONSES_TOOLS, "tool_choice": "none"}, "completed"),
    (grpc_chat, {}, STOP),
    (grpc_chat, {"tools": TOOLS, "tool_choice": NONE}, STOP),
    (connect, {}, STOP),
    (
        connect,
        {"tools": [{"name": "f"}], "toolChoice": {"mode": "TOOL_CHOICE_MODE_NONE"}},
        STOP,
    ),
]


@pytest.mark.parametrize(("door", "asked", "ended"), NO_TOOLS)
async def test_a_calls_block_is_text_and_reasoning_is_told_apart(
    front: InProcessProcessor, model: TextModel, door: Door, asked: dict[str, Any], ended: str
) -> None:
    with saying(model, SPOKEN, SPOKEN) as prompts:
        assert await door(front, **asked) == ("hm", TEXT, ended)
    assert prompts == ["user:hi|<think>"] * 2, "the model is told of no tool"


@pytest.mark.parametrize(
    ("door", "asked", "ended"),
    [
        (chats, _NO_THINKING, "stop"),
        (messages, {"thinking": {"type": "disabled"}}, "end_turn"),
        (responses, {"reasoning": {"effort": "none"}}, "completed"),
        (grpc_chat, {"reasoning": OFF}, STOP),
        (connect, {"reasoning": {"enabled": False}}, STOP),
    ],
)
async def test_without_reasoning_no_parser_runs_either(
    front: InProcessProcessor, model: TextModel, door: Door, asked: dict[str, Any], ended: str
) -> None:
    with saying(model, TEXT, TEXT), mock.patch.object(Parser, "feed") as feed:
        assert await door(front, **asked) == ("", TEXT, ended)
    feed.assert_not_called()


@pytest.mark.parametrize("door", [chats, messages, responses, grpc_chat, connect])
async def test_nor_where_the_format_has_no_reasoning(model: TextModel, door: Door) -> None:
    said = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    async with serving(model, "mistral") as front:
        with saying(model, said, said), mock.patch.object(Parser, "feed") as feed:
            assert (await door(front))[:2] == ("", said)
    feed.assert_not_called()


@pytest.mark.parametrize(
    "asked", [{}, {"tools": TOOLS, "tool_choice": NONE}, {"reasoning": OFF}], ids=str
)
async def test_render_and_parse_read_as_the_chat_does(
    front: InProcessProcessor, model: TextModel, asked: dict[str, Any]
) -> None:
    said = TEXT if "reasoning" in asked else SPOKEN
    chat_start = start("hi", output=EVENTS, **asked).start
    rendered = await front.stub.Render(processor_pb2.RenderRequest(start=chat_start))
    for piece in (
        {"text": said},
        {"token_ids": processor_pb2.TokenIds(ids=model.encode(said, add_special_tokens=False))},
    ):
        request = processor_pb2.ParseRequest(reading=rendered.reading, **piece)
        found = {"reasoning": "", "text": ""}
        async for response in front.stub.Parse(iter([request])):
            for event in response.events:
                found[event.WhichOneof("event")] += getattr(event, event.WhichOneof("event"))
            assert not response.finished.tool_calls
        assert found == {"reasoning": "" if "reasoning" in asked else "hm", "text": TEXT}


@pytest.mark.parametrize("thinking", [True, False])
async def test_a_stop_string_in_a_calls_marker_is_found(
    front: InProcessProcessor, model: TextModel, *, thinking: bool
) -> None:
    """The marker is a special token, and text."""
    asked: dict[str, Any] = {"stop": ["</tool_call>"], **({} if thinking else _NO_THINKING)}
    said = SPOKEN if thinking else TEXT
    with saying(model, said, said):
        _, text, ended = await chats(front, **asked)
    assert (text, ended) == (TEXT.partition("</tool_call>")[0], "stop")


async def test_with_tools_calls_are_calls(front: InProcessProcessor, model: TextModel) -> None:
    with saying(model, SPOKEN, SPOKEN):
        answer = await chat(front.stub, "hi", output=EVENTS, tools=TOOLS, opts=options(500))
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": CHAT_TOOLS}
        (choice,) = (await ask(front.port, CHAT, body)).json["choices"]
    assert [call.name for call in answer.choices[0].tool_calls] == ["f"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
