"""/v1/responses: OpenAI's client, the items of input and output, and tools of all kinds."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio

from millstream_server.engines.simulated import engine
from millstream_server.generation.sampling import Ability, Constraint, ConstraintKind
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import InProcessProcessor
from tests.support.clients.http_api import Response, ask, client
from tests.support.processor.reading import SPOKEN, reading_model, serving
from tests.support.processor.saying import saying

PATH = "/v1/responses"
HI: Any = {"model": "tiny", "input": "hi"}
TOOLS: Any = [
    {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {"s": {"type": "string"}}},
        "strict": False,
    },
    {"type": "function", "name": "g", "parameters": None, "strict": None},
    {"type": "custom", "name": "patch", "description": "Changes a file."},
]
NAMESPACE: Any = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "Files.",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
}


def custom(syntax: str, definition: str) -> Any:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "patch", "format": form}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return reading_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def front(model: TextModel) -> AsyncIterator[InProcessProcessor]:
    async with serving(model) as served:
        yield served


def call(name: str, **arguments: Any) -> str:
    """Write a call as the model does."""
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def events(response: Response) -> list[Any]:
    """Return what events say; each has its type as name, and the next number."""
    *found, done, end = response.body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    said = []
    for number, event in enumerate(found):
        name, data = event.split("\n")
        said.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {said[-1]['type']}"
        assert said[-1]["sequence_number"] == number
    return said


async def test_the_vendors_client_gets_the_same_whole_and_streamed(
    front: InProcessProcessor, model: TextModel
) -> None:
    asked: Any = {**HI, "tools": TOOLS, "metadata": {"a": "b"}, "instructions": "Be kind."}
    async with client(front.address) as api:
        with saying(model, SPOKEN, SPOKEN) as prompts:
            whole = await api.responses.create(**asked)
            async with api.responses.stream(**asked) as stream:
                kinds = [event.type async for event in stream]
                streamed = await stream.get_final_response()
    assert prompts[0] == prompts[1] == "f;g;patch;system:Be kind.|user:hi|<think>"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    answers: Any = (whole, streamed)
    for response in answers:
        thought, message, first, second = response.output
        assert [item.type for item in response.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        assert thought.content[0].text == "hm"
        assert message.content[0].text == response.output_text == "Let me see."
        assert [(c.name, c.arguments, c.status) for c in (first, second)] == [
            ("f", '{"s": "Oslo"}', "completed"),
            ("g", "{}", "completed"),
        ]
        assert (response.status, response.error, response.metadata) == (
            "completed",
            None,
            {"a": "b"},
        )
        assert (response.instructions, response.model) == ("Be kind.", "tiny")
        assert [tool.type for tool in response.tools] == ["function", "function", "custom"]
        # OpenAI's description requires it; its client for Java checks that.
        counted = response.usage.input_tokens_details.model_dump()
        assert counted["cache_write_tokens"] == 0
        assert response.usage.output_tokens == len(SPOKEN) + 1
        assert response.usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")


async def test_items_of_events_are_those_of_the_final_response(
    front: InProcessProcessor, model: TextModel
) -> None:
    said = f"<think>hm</think>So.{call('patch', input='a')}{call('mcp__files__read')}"
    with saying(model, said):
        asked = {**HI, "tools": [*TOOLS, NAMESPACE], "stream": True}
        found = events(await ask(front.port, PATH, asked))
    final = found[-1]["response"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in found if event["type"] == "response.output_item.added"]
    assert final["output"] == done
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert len({item["id"] for item in done}) == 4
    assert {e["item_id"] for e in found if "item_id" in e} == {item["id"] for item in done}
    assert {e["response"]["id"] for e in found if "response" in e} == {final["id"]}
    assert (done[2]["type"], done[2]["name"], done[2]["input"]) == (
        "custom_tool_call",
        "patch",
        "a",
    )
    assert (done[3]["namespace"], done[3]["name"]) == ("mcp__files__", "read")


HISTORY: Any = [
    {"role": "developer", "content": "Be kind."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": None,
    },
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "So.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"s": "Oslo"}'},
    {
        "type": "function_call",
        "call_id": "c2",
        "name": "read",
        "namespace": "mcp__files__",
        "arguments": '{"cut',
    },
    {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "a\nb"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    {"type": "function_call_output", "call_id": "c1", "output": "-3"},
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "ne"}],
    },
    {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Now."}]},
    {
        "type": "agent_message",
        "author": "/lead/a",
        "recipient": "/lead",
        "content": [{"type": "input_text", "text": "ready"}],
    },
    {"role": "user", "content": "and?"},
]


async def test_all_items_reach_the_template(front: InProcessProcessor, model: TextModel) -> None:
    tools = [*TOOLS, NAMESPACE, {"type": "web_search", "external_web_access": True}]
    asked = {**HI, "input": HISTORY, "instructions": "Short.", "tools": tools}
    with saying(model, "<think>so</think>Cold.") as prompts:
        response = await ask(front.port, PATH, asked)
    assert response.json["output"][1]["content"][0]["text"] == "Cold."
    assert [tool["name"] for tool in response.json["tools"]] == ["f", "g", "patch", "mcp__files__"]
    (prompt,) = prompts
    assert prompt == (
        "f;g;patch;mcp__files__read;"
        "system:Short.|system:Be kind.|user:hi|"
        'assistant:(hm)So.[c1 f {"s": "Oslo"}][c2 mcp__files__read {"input": "{\\"cut"}]'
        '[c3 patch {"input": "a\\nb"}]|'
        "tool:-3|tool:none|tool:done|"
        "system:Now.|user:From /lead/a to /lead:\nready|user:and?|<think>"
    )


async def test_tools_that_the_client_finds_can_be_called(
    front: InProcessProcessor, model: TextModel
) -> None:
    search = {
        "type": "tool_search",
        "execution": "client",
        "description": "Finds tools.",
        "parameters": {"type": "object"},
    }
    asked = {**HI, "tools": [search], "stream": True}
    with saying(model, f"</think>{call('tool_search', query='files')}"):
        found = events(await ask(front.port, PATH, asked))
    (item,) = found[-1]["response"]["output"]
    assert {**item, "id": "", "call_id": ""} == {
        "type": "tool_search_call",
        "id": "",
        "call_id": "",
        "status": "completed",
        "execution": "client",
        "arguments": {"query": "files"},
    }
    assert [event["type"].partition(".")[2] for event in found[2:-1]] == [
        "output_item.added",
        "output_item.done",
    ]
    output = {"type": "tool_search_output", "call_id": item["call_id"], "tools": [NAMESPACE]}
    more = {"type": "additional_tools", "tools": [TOOLS[0], NAMESPACE]}
    history = [{"role": "user", "content": "hi"}, item, output, more]
    with saying(model, f"</think>{call('mcp__files__read')}") as prompts:
        response = (await ask(front.port, PATH, {**asked, "input": history, "stream": False})).json
    (prompt,) = prompts
    assert prompt == (
        "tool_search;mcp__files__read;f;user:hi|"
        f'assistant:[{item["call_id"]} tool_search {{"query": "files"}}]|'
        "tool:These tools can be called now: mcp__files__read|<think>"
    )
    (called,) = response["output"]
    assert (called["namespace"], called["name"]) == ("mcp__files__", "read")
    assert response["tools"] == [search]


@pytest.mark.parametrize(
    ("changed", "prompt", "calls"),
    [
        ({"parallel_tool_calls": False}, "f;g;patch;user:hi|<think>", 1),
        ({"reasoning": {"effort": "none"}}, "f;g;patch;user:hi|no <think>", 2),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "f;g;patch;user:hi|<think>", 2),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "g"}],
                }
            },
            "g;user:hi|<think>",
            2,
        ),
    ],
)
async def test_options_of_answers(
    front: InProcessProcessor, model: TextModel, changed: dict[str, Any], prompt: str, calls: int
) -> None:
    with saying(model, SPOKEN) as prompts:
        response = (await ask(front.port, PATH, {**HI, "tools": TOOLS, **changed})).json
    assert prompts == [prompt]
    found = [item["type"] for item in response["output"]]
    assert found == ["reasoning", "message", *["function_call"] * calls]
    applied = "none" if "no <think>" in prompt else None  # this template has no other efforts
    assert response["reasoning"] == {"effort": applied, "summary": None}
    assert response["tool_choice"] == changed.get("tool_choice", "auto")
    assert response["parallel_tool_calls"] == changed.get("parallel_tool_calls", True)


async def test_a_custom_tools_grammar_holds_where_the_engine_takes_grammars(
    model: TextModel,
) -> None:
    tool = custom("lark", 'start: "a" LF\n%import common.LF')
    constraints: list[Constraint | None] = []
    with mock.patch.object(engine, "_ABILITIES", frozenset(Ability)):
        async with serving(model) as front, client(front.address) as api:
            with saying(model, f"</think>{call('patch', input='a')}", constraints=constraints):
                response = await api.responses.create(**HI, tools=[tool])
    (constraint,) = constraints
    assert constraint is not None
    assert constraint.kind is ConstraintKind.STRUCTURAL_TAG
    assert '"pattern": "a\\\\\\\\n"' in constraint.source  # as JSON writes it, in JSON
    assert response.tools[0].model_dump(exclude_none=True) == tool


async def test_sampling_that_counts_is_in_the_response(
    front: InProcessProcessor, model: TextModel
) -> None:
    knobs = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 99, "prompt_cache_key": "k"}
    more = {"store": True, "text": {"verbosity": "low"}}
    with saying(model, "<think>a</think>b"):
        response = (await ask(front.port, PATH, {**HI, **knobs, **more})).json
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert {name: response[name] for name in knobs} == knobs
    assert (response["store"], response["presence_penalty"]) == (False, 0.0)


@pytest.mark.parametrize(
    ("changed", "param", "code", "says"),
    [
        ({"input": None}, "input", "invalid_request", "a text, or 1 to 4096 items"),
        ({"input": []}, "input", "invalid_request", "1 to 4096"),
        ({"input": [{"content": "a"}]}, "input[0].role", "invalid_request", "is missing"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input[0].type",
            "unsupported_feature",
            "'item_reference'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]",
            "unsupported_feature",
            "text and images",
        ),
        (
            {
                "instructions": "a",
                "input": [
                    {
                        "role": "developer",
                        "content": [{"type": "input_image", "image_url": "https://x/y.png"}],
                    },
                    {"role": "user", "content": "b"},
                ],
            },
            "input[0].content[0].image_url",
            "invalid_request",
            "only USER and TOOL messages",
        ),
        (
            {
                "input": [
                    {"role": "assistant", "content": "a"},
                    {"type": "function_call", "call_id": "c", "name": "a b", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": ""},
                ]
            },
            "input[1].name",
            "invalid_request",
            "must match",
        ),
        (
            {
                "input": [
                    HISTORY[4],
                    {"type": "function_call_output", "call_id": "c9", "output": ""},
                ]
            },
            "input[1].call_id",
            "invalid_request",
            "no earlier",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request", "1 or more"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "context_length_exceeded", "exceed"),
        ({"max_tokens": 9}, "max_tokens", "unsupported_feature", "use max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_feature",
         "send the whole conversation"),
        ({"background": True}, "background", "unsupported_feature", "not supported"),
        ({"truncation": "auto"}, "truncation", "unsupported_feature", "not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema",
         "invalid_request", "is missing"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "unsupported_feature",
         "text.format"),
        ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_feature",
         "logprobs"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type", "unsupported_feature",
         "clients do"),
        ({"tools": [{"type": "tool_search", "execution": "server"}]}, "tools[0].type",
         "unsupported_feature", "'tool_search'"),
        (
            {"tools": [{**NAMESPACE, "tools": [{"type": "function", "name": "a b"}]}, TOOLS[0]]},
            "tools[0].tools[0].name",
            "invalid_request",
            "must match",
        ),
        (
            {"tools": [NAMESPACE, {**TOOLS[0], "strict": True}]},
            "tools[1].strict",
            "unsupported_feature",
            "no structural tags",
        ),
        ({"tools": [NAMESPACE, custom("lark", "start: /a+/")]}, "tools[1].format",
         "unsupported_feature", "no structural tags"),
        ({"tools": [custom("lark", "start: start")]}, "tools[0].format.definition",
         "unsupported_feature", "'start' refers to itself"),
        ({"tools": [custom("regex", "")]}, "tools[0].format.definition", "invalid_request",
         "is missing"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_request", "there are no tools"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice",
         "invalid_request", "none of tools"),
        ({"tool_choice": {"type": "mcp"}, "tools": TOOLS}, "tool_choice.type",
         "unsupported_feature", "'mcp'"),
        ({"model": "none"}, None, "model_not_found", "GET /v1/models"),
    ],
)  # fmt: skip
async def test_what_can_not_be_done_is_refused_by_name(
    front: InProcessProcessor, changed: dict[str, Any], param: str | None, code: str, says: str
) -> None:
    for stream in (False, True):
        response = await ask(front.port, PATH, {**HI, **changed, "stream": stream})
        error = response.json["error"]
        assert response.status == (404 if code == "model_not_found" else 400)
        assert (error["param"], error["code"]) == (param, code)
        assert says in error["message"]
