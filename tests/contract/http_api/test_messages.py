"""/v1/messages: Anthropic's client, the order of events, blocks and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import InProcessProcessor
from tests.support.clients.http_api import ask
from tests.support.processor.reading import SPOKEN, reading_model, serving
from tests.support.processor.saying import saying

PATH = "/v1/messages"
HI: Any = {
    "model": "tiny",
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "hi"}],
}
TOOLS: Any = [
    {"name": "f", "input_schema": {"type": "object", "properties": {"s": {"type": "string"}}}},
    {"name": "g", "input_schema": {"type": "object"}},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return reading_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def front(model: TextModel) -> AsyncIterator[InProcessProcessor]:
    async with serving(model) as served:
        yield served


def client(front: InProcessProcessor) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=f"http://{front.address}",
        api_key="any",
        max_retries=0,
        _strict_response_validation=True,
    )


def events(body: bytes) -> list[dict[str, Any]]:
    """Return what events say; each has its type as name."""
    *found, end = body.decode().split("\n\n")
    assert end == ""
    said = []
    for event in found:
        name, data = event.split("\n")
        said.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {said[-1]['type']}"
    return said


async def test_blocks_come_in_order_and_reasoning_ends_with_a_signature(
    front: InProcessProcessor, model: TextModel
) -> None:
    with saying(model, SPOKEN):
        response = await ask(front.port, PATH, {**HI, "tools": TOOLS, "stream": True})
    said = events(response.body)
    order: list[tuple[str, int | None, str]] = []
    for event in said:
        kind = event.get("delta", event.get("content_block", {})).get("type", "")
        step = (event["type"], event.get("index"), kind)
        if order[-1:] != [step]:  # pieces of one kind are one step
            order.append(step)
    block = [("content_block_start", "content_block_delta", "content_block_stop")] * 4
    assert order == [
        ("message_start", None, ""),
        (block[0][0], 0, "thinking"),
        (block[0][1], 0, "thinking_delta"),
        (block[0][1], 0, "signature_delta"),
        (block[0][2], 0, ""),
        (block[1][0], 1, "text"),
        (block[1][1], 1, "text_delta"),
        (block[1][2], 1, ""),
        (block[2][0], 2, "tool_use"),
        (block[2][1], 2, "input_json_delta"),
        (block[2][2], 2, ""),
        (block[3][0], 3, "tool_use"),
        (block[3][1], 3, "input_json_delta"),
        (block[3][2], 3, ""),
        ("message_delta", None, ""),
        ("message_stop", None, ""),
    ]
    assert said[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert all(isinstance(count, int) for count in said[-2]["usage"].values())


async def test_the_vendors_client_gets_the_same_whole_and_streamed(
    front: InProcessProcessor, model: TextModel
) -> None:
    async with client(front) as api:
        with saying(model, SPOKEN, SPOKEN):
            whole = await api.messages.create(**HI, tools=TOOLS)
            async with api.messages.stream(**HI, tools=TOOLS) as stream:
                streamed = await stream.get_final_message()
    for message in (whole, streamed):
        thinking, text, first, second = message.content
        assert (thinking.type, text.type) == ("thinking", "text")
        assert (getattr(thinking, "thinking", ""), getattr(text, "text", "")) == (
            "hm",
            "Let me see.",
        )
        calls: Any = (first, second)
        assert [(c.name, c.input) for c in calls] == [("f", {"s": "Oslo"}), ("g", {})]
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == len(SPOKEN) + 1


async def test_history_system_and_results_reach_the_template(
    front: InProcessProcessor, model: TextModel
) -> None:
    history: Any = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "none"},
                {"type": "text", "text": "So."},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"s": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "-3"},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    asked = {**HI, "messages": history, "system": [{"type": "text", "text": "Be kind."}]}
    async with client(front) as api:
        with saying(model, "<think>so</think>Cold.") as prompts:
            await api.messages.create(**asked, tools=TOOLS, thinking={"type": "disabled"})
        counted = await api.messages.count_tokens(
            model="tiny",
            messages=history,
            system="Be kind.",
            tools=TOOLS,
            thinking={"type": "disabled"},
        )
    (prompt,) = prompts
    told, _, later = prompt.partition("assistant:")
    assert told == "f;g;system:Be kind.|user:hi|"
    assert later == '(hm)So.[c1 f {"s": "Oslo"}]|tool:-3|user:and?|no <think>'
    assert counted.input_tokens == len(prompt.encode())


@pytest.mark.parametrize(
    ("most", "stops", "reason", "sequence"),
    [
        (3, [], "max_tokens", None),
        (300, ["se"], "stop_sequence", "se"),
        (300, [], "end_turn", None),
    ],
)
async def test_why_an_answer_ends(
    front: InProcessProcessor,
    model: TextModel,
    *,
    most: int,
    stops: list[str],
    reason: str,
    sequence: str | None,
) -> None:
    asked = {**HI, "max_tokens": most, "stop_sequences": stops}
    with saying(model, "<think>x</think>I see."):
        message = (await ask(front.port, PATH, asked)).json
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("changed", "status", "kind", "says"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 9999}, 400, "invalid_request_error", "context length"),
        ({"model": "none"}, 404, "not_found_error", "GET /v1/models"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers: is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error",
         "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "there are no tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0]: this server takes text and images",
        ),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a",
                 "content": [{"type": "text", "text": ""}] * 16_384}]}]},
            400,
            "invalid_request_error",
            "at most 16384 content parts",
        ),
    ],
)  # fmt: skip
async def test_errors_have_anthropics_shape(
    front: InProcessProcessor, *, changed: dict[str, Any], status: int, kind: str, says: str
) -> None:
    response = await ask(front.port, PATH, {**HI, **changed})
    assert (response.status, response.json["type"]) == (status, "error")
    assert response.json["error"]["type"] == kind
    assert says in response.json["error"]["message"]
