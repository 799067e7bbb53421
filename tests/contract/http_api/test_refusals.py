"""Errors of the HTTP API: status, OpenAI's shape, the field by the name that the client used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import InProcessProcessor, suite
from tests.support.clients.http_api import CHAT, HI, Response, ask


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InProcessProcessor]:
    model = TextModel.load(alphabet_model(tmp_path_factory.mktemp("plain") / "model"))
    async with suite(model) as (served, _):
        yield served


def user(*parts: dict[str, Any], **message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts), **message}]}


PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("changed", "param", "code", "says"),
    [
        ({"temperature": -1}, "temperature", "invalid_request", "0 or more"),
        ({"temperature": "hot"}, "temperature", "invalid_request", "Expected `float | null`"),
        ({"max_tokens": 0}, "max_tokens", "invalid_request", "1 or more"),
        ({"max_tokens": 1000}, "max_tokens", "context_length_exceeded", "max_tokens 1000 exceed"),
        ({"n": 17}, "n", "invalid_request", "1 to 16"),
        ({"stop": [""]}, "stop[0]", "invalid_request", "1 to 256 characters"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_request", "no token id"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_request", "numbers by token id"),
        (
            {"logit_bias": dict.fromkeys(map(str, range(40_000)), 1)},
            "logit_bias",
            "invalid_request",
            "at most 262144 bytes",
        ),
        ({"tools": [TOOL] * 129}, "tools", "invalid_request", "at most 128 tools, not 129"),
        (
            user(*[{"type": "text", "text": ""}] * 16_385),
            "messages",
            "invalid_request",
            "at most 16384 content parts",
        ),
        ({"audio": [[]] * 20}, "audio", "unsupported_feature", "not supported"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_request", "no token id"),
        ({"top_k": 1 << 31}, "top_k", "invalid_request", "<= 2147483647"),
        ({"seed": 1 << 63}, "seed", "invalid_request", "<= 9223372036854775807"),
        ({"top_logprobs": 1}, "top_logprobs", "invalid_request", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_request", "0 to 20"),
        ({"messages": []}, "messages", "invalid_request", "1 to 4096"),
        ({"messages": [{"role": "x"}]}, "messages[0].role", "invalid_request", "Invalid enum"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages[0].tool_call_id",
            "invalid_request",
            "must name the tool call",
        ),
        (
            user({"type": "input_audio", "input_audio": {"data": ""}}),
            "messages[0].content[0]",
            "unsupported_feature",
            "text, images and videos only",
        ),
        (
            user(PNG),
            "messages[0].content[0].image_url.url",
            "unsupported_feature",
            "this model takes no image",
        ),
        (
            user({"type": "image_url", "image_url": {"url": "data:image/png,AAAA"}}),
            "messages[0].content[0].image_url.url",
            "invalid_request",
            ";base64",
        ),
        (
            user({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,*"}}),
            "messages[0].content[0].video_url.url",
            "invalid_request",
            "isn't base64",
        ),
        ({"tools": [TOOL]}, "tools", "unsupported_feature", "--formats"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_request", "there are no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
            "invalid_request",
            "none of tools",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "invalid_request",
            "is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "x"}}}},
            "response_format",
            "invalid_request",
            "must not refer",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_feature", "no variable"),
        (
            {"chat_template_kwargs": {"x": 1}},
            "chat_template_kwargs",
            "invalid_request",
            "unknown field `x`",
        ),
        ({"store": True}, "store", "unsupported_feature", "keeps no conversations"),
        ({"functions": []}, "functions", "unsupported_feature", "use tools"),
        ({"stream_options": {}}, "stream_options", "invalid_request", "needs stream"),
    ],
)
async def test_what_can_not_be_done_is_refused_by_name(
    front: InProcessProcessor, changed: dict[str, Any], param: str, code: str, says: str
) -> None:
    for stream in (False, True) if "stream_options" not in changed else (False,):
        response = await ask(front.port, CHAT, {**HI, **changed, "stream": stream})
        error = response.json["error"]
        assert response.status == 400
        assert (error["param"], error["code"]) == (param, code)
        assert error["type"] == "invalid_request_error"
        assert says in error["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b'{"model": "\xff", "messages": []}', "no JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `messages`"),
        (b'{"messages": [{"role": "user", "content": "a"}], "functions": "\xff"}', "no JSON"),
        (b'{"messages": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
    ],
)
async def test_what_is_no_body_of_a_chat(front: InProcessProcessor, body: bytes, says: str) -> None:
    response = await ask(front.port, CHAT, body)
    assert response.status == 400
    assert says in response.json["error"]["message"]


_HI = b'"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], '
_BAD = b'{"\xff": 1}'
_TOOLS = b'"tools": [{"type": "function", "function": {"name": "f", "parameters": %b}}]' % _BAD
_INPUTS = b'"tools": [{"name": "f", "input_schema": %b}]' % _BAD
_FORM = b'{"type": "json_schema", "name": "f", "schema": %b}' % _BAD
_SCHEMA = b'"response_format": {"type": "json_schema", "json_schema": %b}' % _FORM
_CALL = b'[{"type": "tool_use", "id": "i", "name": "f", "input": %b}]' % _BAD


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, _HI + _TOOLS),
        (CHAT, _HI + _SCHEMA),
        (f"{CHAT}/render", _HI + _TOOLS),
        ("/tokenize", _HI + _TOOLS),
        (
            "/v1/responses",
            b'"input": "a", "tools": [{"type": "function", "name": "f", "parameters": %b}]' % _BAD,
        ),
        ("/v1/responses", b'"input": "a", "text": {"format": %b}' % _FORM),
        ("/v1/messages", _HI + _INPUTS),
        ("/v1/messages", _HI + b'"output_config": {"format": %b}' % _FORM),
        (
            "/v1/messages",
            b'"max_tokens": 1, "messages": [{"role": "assistant", "content": %b}]' % _CALL,
        ),
        ("/v1/messages/count_tokens", _HI + _INPUTS),
        ("/v1/embeddings", b'"input": ["\xff"]'),
    ],
)
async def test_a_body_is_utf_8_also_where_it_is_only_passed_on(
    front: InProcessProcessor, path: str, fields: bytes
) -> None:
    response = await ask(front.port, path, b'{"model": "tiny", ' + fields + b"}")
    assert response.status == 400
    assert "the body is no JSON: 'utf-8' codec can't decode" in response.json["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_models_and_paths_that_are_not_there(front: InProcessProcessor) -> None:
    found: list[Response] = [
        await ask(front.port, CHAT, {**HI, "model": "none"}),
        await ask(front.port, "/v1/nothing", {}),
        await ask(front.port, "/v1/models", {}),
    ]
    assert [(each.status, each.json["error"]["code"]) for each in found] == [
        (404, "model_not_found"),
        (404, "unknown_url"),
        (404, "unknown_url"),
    ]
    assert "GET /v1/models names those" in found[0].json["error"]["message"]
