"""/v1/chat/completions: what it answers, whole and in events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio

from millstream_server.engines.simulated import engine
from millstream_server.generation.sampling import Ability, Constraint, ConstraintKind
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import InProcessProcessor, suite
from tests.support.clients.http_api import CHAT, HI, ask, client
from tests.support.processor.reading import SPOKEN, reading_model, serving
from tests.support.processor.saying import saying

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "g"}},
]


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(alphabet_model(tmp_path_factory.mktemp("plain") / "model"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return reading_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def plain(plain_model: TextModel) -> AsyncIterator[InProcessProcessor]:
    async with suite(plain_model) as (front, _):
        yield front


@pytest_asyncio.fixture
async def front(model: TextModel) -> AsyncIterator[InProcessProcessor]:
    async with serving(model) as served:
        yield served


async def test_a_whole_answer(plain: InProcessProcessor) -> None:
    async with client(plain.address) as openai:
        answer = await openai.chat.completions.create(**HI, max_tokens=5)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("ABCDE", "length")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 5)
    assert answer.usage.total_tokens == 14


async def test_the_same_in_events(plain: InProcessProcessor) -> None:
    body = {**HI, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    response = await ask(plain.port, CHAT, body, headers="X-Request-Id: me-1\r\n")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "me-1"
    *texts, finish, usage = response.events
    assert {(e["id"], e["object"], e["model"]) for e in response.events} == {
        ("chatcmpl-me-1", "chat.completion.chunk", "tiny")
    }
    assert texts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "role" not in "".join(str(e) for e in texts[1:])
    assert "".join(e["choices"][0]["delta"]["content"] for e in texts) == "ABCDE"
    assert all(e["choices"][0]["finish_reason"] is None for e in texts)
    assert all(e["usage"] is None for e in [*texts, finish])
    assert finish["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    ]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5


async def test_without_usage_asked_for_there_is_none(plain: InProcessProcessor) -> None:
    response = await ask(plain.port, CHAT, {**HI, "max_tokens": 2, "stream": True})
    assert all("usage" not in event and event["choices"] for event in response.events)


SAID = [
    {"reasoning_content": "hm", "reasoning": "hm"},
    {"content": "Let me see."},
    ("f", '{"s": "Oslo"}'),
    ("g", "{}"),
]


async def test_reasoning_text_and_calls_are_told_apart_in_order(
    front: InProcessProcessor, model: TextModel
) -> None:
    body = {**HI, "tools": TOOLS, "stream": True}
    with saying(model, SPOKEN) as prompts:
        response = await ask(front.port, CHAT, body)
    assert prompts[0].startswith("f;g;user:hi|")
    opening, *deltas = [event["choices"][0] for event in response.events]
    assert opening["delta"] == {"role": "assistant", "content": ""}
    assert deltas.pop()["finish_reason"] == "tool_calls"
    assert _joined([d["delta"] for d in deltas]) == SAID


def _joined(deltas: list[dict[str, Any]]) -> list[Any]:
    """Join neighbours of one kind; calls become (name, arguments)."""
    found: list[Any] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                found.append((call["function"]["name"], ""))
            else:
                name, so_far = found[-1]
                found[-1] = (name, so_far + call["function"]["arguments"])
        if "tool_calls" in delta:
            continue
        last = found[-1] if found and isinstance(found[-1], dict) else {}
        if last.keys() == delta.keys():
            found[-1] = {key: last[key] + delta[key] for key in last}
        else:
            found.append(delta)
    return found


async def test_the_same_whole_and_back_in_the_next_request(
    front: InProcessProcessor, model: TextModel
) -> None:
    async with client(front.address) as openai:
        with saying(model, SPOKEN, "<think>so</think>Cold.") as prompts:
            tools: Any = TOOLS
            first = await openai.chat.completions.create(**HI, tools=tools)
            (choice,) = first.choices
            said = choice.message
            assert (said.content, choice.finish_reason) == ("Let me see.", "tool_calls")
            assert said.model_extra == {"reasoning_content": "hm", "reasoning": "hm"}
            calls: Any = said.tool_calls
            assert [(c.function.name, c.function.arguments) for c in calls] == SAID[2:]
            assert first.usage is not None
            details = first.usage.completion_tokens_details
            assert details is not None
            assert details.reasoning_tokens == len("<think>hm</think>")
            history: Any = [
                *HI["messages"],
                said.model_dump(exclude_none=True),
                *({"role": "tool", "tool_call_id": c.id, "content": "-3"} for c in calls),
            ]
            second = await openai.chat.completions.create(
                model="tiny", messages=history, tools=tools
            )
            assert second.choices[0].message.content == "Cold."
    assert "assistant:(hm)Let me see.[" in prompts[1]
    assert prompts[1].count("tool:-3|") == 2


@pytest.mark.parametrize(
    ("changed", "prompt", "calls"),
    [
        ({"parallel_tool_calls": False}, "f;g;user:hi|<think>", 1),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "f;g;user:hi|no <think>", 2),
        ({"reasoning_effort": "none"}, "f;g;user:hi|no <think>", 2),
    ],
)
async def test_options_of_answers(
    front: InProcessProcessor, model: TextModel, changed: dict[str, Any], prompt: str, calls: int
) -> None:
    with saying(model, SPOKEN) as prompts:
        response = await ask(front.port, CHAT, {**HI, "tools": TOOLS, **changed})
    message = response.json["choices"][0]["message"]
    assert prompts == [prompt]
    assert len(message["tool_calls"]) == calls
    assert message["content"] == "Let me see."


async def test_choices_stops_logprobs_and_knobs(plain: InProcessProcessor) -> None:
    async with client(plain.address) as openai:
        answer = await openai.chat.completions.create(
            **HI,
            max_completion_tokens=9,
            n=2,
            stop=["D", "zz"],
            logprobs=True,
            top_logprobs=1,
            seed=7,
            logit_bias={"5": 1},
            temperature=0.5,
            extra_body={"top_k": 3, "priority": "high", "nobody knows": 1},
        )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert (choice.message.content, choice.finish_reason) == ("ABC", "stop")
        assert choice.logprobs is not None
        tokens: Any = choice.logprobs.content
        assert [token.token for token in tokens] == ["A", "B", "C", "D"]
        assert (tokens[0].bytes, tokens[0].top_logprobs[0].token) == ([65], "A")


async def test_choices_and_logprobs_in_events(plain: InProcessProcessor) -> None:
    body = {**HI, "max_tokens": 4, "n": 2, "logprobs": True, "stream": True}
    response = await ask(plain.port, CHAT, body)
    for index in range(2):
        found = [e["choices"][0] for e in response.events if e["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in found) == "ABCD"
        tokens = [t["token"] for c in found for t in (c["logprobs"] or {"content": ()})["content"]]
        assert tokens == ["A", "B", "C", "D"]
        assert [c["finish_reason"] for c in found][-1] == "length"


@pytest.mark.parametrize(
    ("abilities", "answer", "kind", "reasoning"),
    [
        (frozenset(Ability), "hm</think>{}", ConstraintKind.STRUCTURAL_TAG, "hm"),
        (frozenset(Ability) - {Ability.STRUCTURAL_TAGS}, "{}", ConstraintKind.JSON_SCHEMA, None),
    ],
)
async def test_json_of_a_schema_comes_behind_reasoning_where_the_engine_can_say_so(
    model: TextModel,
    abilities: frozenset[Ability],
    answer: str,
    kind: ConstraintKind,
    reasoning: str | None,
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    constraints: list[Constraint | None] = []
    with mock.patch.object(engine, "_ABILITIES", abilities):
        async with serving(model) as front:
            with saying(model, answer, constraints=constraints):
                response = await ask(front.port, CHAT, {**HI, "response_format": schema})
    message = response.json["choices"][0]["message"]
    assert (message["content"], message.get("reasoning")) == ("{}", reasoning)
    (constraint,) = constraints
    assert constraint is not None
    assert constraint.kind is kind


async def test_a_strict_tool_is_refused_where_the_engine_takes_no_grammar(
    front: InProcessProcessor,
) -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    response = await ask(front.port, CHAT, {**HI, "tools": [TOOLS[1], strict]})
    assert response.status == 400
    error = response.json["error"]
    assert (error["param"], error["code"]) == ("tools[1].function.strict", "unsupported_feature")
