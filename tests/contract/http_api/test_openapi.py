"""/openapi.json: valid, whole, and what the endpoints do, also with bodies that a fuzzer makes."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import pytest_asyncio
from openapi_spec_validator import OpenAPIV31SpecValidator

from millstream_server.processor.http import schema
from millstream_testing.in_process import MODEL
from tests.support.clients.http_api import CHAT, HI, ask
from tests.support.clients.openapi_fuzz import fuzz
from tests.support.processor.every_ability import EveryAbility, every_ability
from tests.support.wire.http_service import raw

EXAMPLES = 6
"""Of valid bodies and of others, for each endpoint; `tests.benchmarks.openapi_fuzz` sends more."""


@pytest_asyncio.fixture
async def suite(tmp_path: Path) -> AsyncIterator[EveryAbility]:
    async with every_ability(tmp_path / "model") as served:
        yield served


async def get(port: int, path: str) -> Any:
    async with raw(port) as wire:
        wire.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode())
        status, _, parts = await wire.response()
    assert status == 200
    return json.loads(b"".join(parts))


async def document(port: int) -> Any:
    return await get(port, "/openapi.json")


async def test_the_document_is_valid_and_whole(suite: EveryAbility) -> None:
    found = await document(suite.port)
    OpenAPIV31SpecValidator(found).validate()
    assert found["info"]["version"] == importlib.metadata.version("millstream")
    missing = (await ask(suite.port, "/nothing", {})).json["error"]["message"]
    assert sorted(found["paths"]) == missing.partition("it serves ")[2].split(", ")
    chat = found["components"]["schemas"]["Chat"]["properties"]
    assert chat.keys() == {field.name for field in msgspec.structs.fields(schema.Chat)}
    assert chat["store"]["enum"] == [None, False]
    assert chat["top_k"]["anyOf"][0]["maximum"] == 2**31 - 1
    assert "millstream_server" not in json.dumps(found)


async def test_events_are_as_it_says(suite: EveryAbility) -> None:
    found = await document(suite.port)
    content = found["paths"][CHAT]["post"]["responses"]["200"]["content"]
    (event,) = content["text/event-stream"]["x-event-data"]
    body = {**HI, "max_tokens": 3, "stream": True, "logprobs": True}
    for said in (await ask(suite.port, CHAT, body)).events:
        jsonschema.validate(said, {**event, "components": found["components"]})


_ASKED: Mapping[str, Any] = {
    CHAT: {**HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 1},
    "/v1/completions": {"model": MODEL, "prompt": "a", "max_tokens": 3, "logprobs": 1},
    "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 16},
    "/v1/messages": {**HI, "max_tokens": 3},
    "/v1/messages/count_tokens": HI,
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"], "return_documents": True},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/images/generations": {"prompt": "a"},
    "/tokenize": HI,
    "/detokenize": {"tokens": [35]},
}


async def test_answers_and_failures_have_no_other_fields_than_it_says(suite: EveryAbility) -> None:
    found = await document(suite.port)
    for name, component in found["components"]["schemas"].items():
        if name not in {"Outcome", "Repeated"}:  # two halves of one object
            component["unevaluatedProperties"] = "properties" not in component

    def check(path: str, verb: str, status: str, said: Any) -> None:
        response = found["paths"][path][verb]["responses"][status]
        if "$ref" in response:
            response = found["components"]["responses"][response["$ref"].rpartition("/")[2]]
        described = response["content"]["application/json"]["schema"]
        whole = {**described, "unevaluatedProperties": False, "components": found["components"]}
        jsonschema.validate(said, whole)

    for path, body in _ASKED.items():
        check(path, "post", "200", (await ask(suite.port, path, body)).json)
        check(path, "post", "400", (await ask(suite.port, path, b"{")).json)
    # as Codex asks
    check("/v1/models", "get", "200", await get(suite.port, "/v1/models?client_version=1"))
    check("/v1/models/{model}", "get", "200", await get(suite.port, f"/v1/models/{MODEL}"))


@pytest.mark.timeout(180)
async def test_bodies_of_a_fuzzer_get_what_it_says(suite: EveryAbility) -> None:
    found = await document(suite.port)
    wrong = await asyncio.to_thread(fuzz, found, suite.front.address, EXAMPLES)
    assert not wrong, "\n\n".join(wrong)
