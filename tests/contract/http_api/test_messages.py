"""/v1/messages: Anthropic's client, blocks and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import anthropic
import pytest
import pytest_asyncio

from millstream_server.engines.simulated import engine
from millstream_server.generation.sampling import Ability, Constraint, ConstraintKind
from millstream_server.processor.http import anthropic_requests as requests
from millstream_server.processor.http import anthropic_schema as schema
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


async def test_an_answer_goes_on_in_a_prefill(front: InProcessProcessor, model: TextModel) -> None:
    said: Any = [{"type": "thinking", "thinking": "hm", "signature": ""}]
    said += [{"type": "text", "text": text} for text in ("Let", " me")]
    asked = {**HI, "messages": [*HI["messages"], {"role": "assistant", "content": said}]}
    async with client(front) as api:
        with saying(model, " see.", " see.") as prompts:
            whole = await api.messages.create(**asked)
            async with api.messages.stream(**asked) as stream:
                streamed = await stream.get_final_message()
        counted = await api.messages.count_tokens(model="tiny", messages=asked["messages"])
    for message in (whole, streamed):
        assert [(b.type, getattr(b, "text", "")) for b in message.content] == [("text", " see.")]
    assert prompts == ["user:hi|assistant:(hm)Let me"] * 2
    assert counted.input_tokens == whole.usage.input_tokens == len(prompts[0])


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
async def test_an_empty_prefill_asks_for_nothing(
    front: InProcessProcessor, model: TextModel, content: Any
) -> None:
    asked = {**HI, "messages": [*HI["messages"], {"role": "assistant", "content": content}]}
    with saying(model, "hm</think>Hi.") as prompts:
        response = await ask(front.port, PATH, asked)
    assert (response.status, prompts) == (200, ["user:hi|<think>"])


async def test_instructions_in_the_middle_and_none_for_billing(
    front: InProcessProcessor, model: TextModel
) -> None:
    """As Claude Code sends them; what it counts for billing differs in each request."""
    system = ["x-anthropic-billing-header: cc_version=2; cch=74943;", "Be kind.", "Be brief."]
    asked = {
        **HI,
        "system": [{"type": "text", "text": text} for text in system],
        "messages": [*HI["messages"], {"role": "system", "content": "Agents: none."}],
    }
    with saying(model, "hm</think>Hi.") as prompts:
        response = await ask(front.port, PATH, asked)
    assert response.status == 200
    assert prompts == ["system:Be kind.\nBe brief.|user:hi|system:Agents: none.|<think>"]


def test_a_user_is_the_key_of_a_session() -> None:
    def session(user: str | None) -> str:
        metadata = schema.Metadata(user)
        asked = schema.Messages(messages=[], max_tokens=1, metadata=metadata)
        return requests.options_of(asked).session

    assert session("a" * 500) == session("a" * 500) != session("b")
    assert len(session("a" * 500)) <= 128
    assert session(None) == ""


async def test_json_of_a_schema_and_strict_tools_by_a_grammar(model: TextModel) -> None:
    form: Any = {"type": "json_schema", "schema": {"type": "object"}}
    strict: Any = [{**TOOLS[0], "strict": True}]
    constraints: list[Constraint | None] = []
    with mock.patch.object(engine, "_ABILITIES", frozenset(Ability)):
        async with serving(model) as served, client(served) as api:
            with saying(model, "hm</think>{}", "hm</think>No.", constraints=constraints):
                said = await api.messages.create(**HI, output_config={"format": form})
                await api.messages.create(**HI, tools=strict)
    thought, text = said.content
    assert (thought.type, text.type, getattr(text, "text", "")) == ("thinking", "text", "{}")
    assert [c and c.kind for c in constraints] == [ConstraintKind.STRUCTURAL_TAG] * 2


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


def prefilled(content: Any, **more: Any) -> Any:
    return {"messages": [*HI["messages"], {"role": "assistant", "content": content}], **more}


@pytest.mark.parametrize(
    ("changed", "status", "kind", "says"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        # Claude Code reads the numbers of both.
        ({"max_tokens": 9999}, 400, "invalid_request_error",
         "input length and `max_tokens` exceed context limit: 15 + 9999 > 2048"),
        ({"system": "A" * 3000}, 400, "invalid_request_error",
         "prompt is too long: 3023 tokens > 2048 maximum"),
        ({"tools": [{**TOOLS[1], "strict": True}]}, 400, "invalid_request_error",
         "tools[0].strict: needs a grammar"),
        ({"tools": [{"name": "f", "input_schema": {"$ref": "x"}}]}, 400, "invalid_request_error",
         "tools[0].input_schema: must not refer"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "x"}}}}, 400,
         "invalid_request_error", "output_config.format: json_schema must not refer"),
        ({"messages": [{"role": "system", "content": [{"type": "image", "source": {
            "type": "url", "url": "x"}}]}]}, 400, "invalid_request_error",
         "messages[0].content[0]: must be text"),
        ({"model": "none"}, 404, "not_found_error", "GET /v1/models"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers: is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error",
         "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "there are no tools"),
        (prefilled("Hm \n"), 400, "invalid_request_error",
         "messages[1].content: the assistant's last message can't end with whitespace"),
        (prefilled([{"type": "text", "text": "So"}, {"type": "thinking", "thinking": "hm"}]), 400,
         "invalid_request_error", "messages[1].content: the last block"),
        (prefilled("So", thinking={"type": "adaptive"}), 400, "invalid_request_error",
         "thinking: can't be used"),
        (prefilled("So", output_config={"format": {"type": "json_schema", "schema": {}}}), 400,
         "invalid_request_error", "output_config.format: can't be kept"),
        (prefilled([{"type": "tool_use", "id": "a", "name": "f", "input": {}}]), 400,
         "invalid_request_error", "send their results"),
        (prefilled('<tool_call>\n{"name": "g"}\n</tool_call>', tools=TOOLS), 400,
         "invalid_request_error", "messages: the last message has a tool call in its text"),
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
