"""Failures of answers: a status where nothing was sent, else an event; both as the vendor's package
reads them. A whole answer never says 200 and has an error in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from anthropic.types import ErrorResponse
from openai.types.responses import ResponseFailedEvent
from openai.types.shared import ErrorObject

from millstream_server.processor.choice import Choice
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import ALPHABET, suite
from millstream_testing.waiting import until
from tests.support.clients.http_api import CHAT
from tests.support.wire.http_service import post, raw

NO_TOKEN = replace(ALPHABET, prefill_s_per_token=30)
SLOW = replace(ALPHABET, step_s=0.02)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(alphabet_model(tmp_path_factory.mktemp("plain") / "model"))


def _openai(body: Any) -> str:
    return ErrorObject.model_validate(body["error"]).message


def _failed(body: Any) -> str:
    error = ResponseFailedEvent.model_validate(body).response.error
    assert error is not None
    return error.message


def _anthropic(body: Any) -> str:
    return ErrorResponse.model_validate(body).error.message


@dataclass(frozen=True)
class Api:
    """An endpoint: what it is asked, and how its errors are read."""

    path: str
    asked: dict[str, Any]
    message: Callable[[Any], str]
    """Of the body of a refusal."""
    last_message: Callable[[Any], str]
    """Of the event that ends a stream."""
    done: bool = True
    """`[DONE]` comes behind that."""


APIS = [
    Api(CHAT, {"messages": HI, "max_tokens": 400}, _openai, _openai),
    Api("/v1/completions", {"prompt": "a", "max_tokens": 400}, _openai, _openai),
    Api("/v1/responses", {"input": HI, "max_output_tokens": 400}, _openai, _failed),
    Api("/v1/messages", {"messages": HI, "max_tokens": 400}, _anthropic, _anthropic, done=False),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
async def test_a_worker_lost_before_the_first_token(
    model: TextModel, api: Api, *, stream: bool
) -> None:
    async with suite(model, NO_TOKEN) as (front, one), raw(front.port) as wire:
        wire.send(post(api.path, json.dumps({**api.asked, "stream": stream}).encode()))
        await one.until_running(1)
        await one.server.stop(0)
        refused(api, *await wire.response())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
async def test_a_worker_lost_within_an_answer(model: TextModel, api: Api, *, stream: bool) -> None:
    emit = mock.patch.object(Choice, "emit", autospec=True, side_effect=Choice.emit)
    async with suite(model, SLOW) as (front, one), raw(front.port) as wire:
        with emit as emitted:
            wire.send(post(api.path, json.dumps({**api.asked, "stream": stream}).encode()))
            await until(lambda: emitted.call_count > 2)
            await one.server.stop(0)
            status, headers, parts = await wire.response()
    if not stream:
        refused(api, status, headers, parts)
        return
    assert (status, headers["content-type"][:17]) == (200, "text/event-stream")
    *before, last, end = b"".join(parts).decode().split("\n\n")
    assert end == ""
    if api.done:
        assert last == "data: [DONE]"
        last = before.pop()
    assert before
    assert "worker" in api.last_message(json.loads(last.partition("data: ")[2]))


def refused(api: Api, status: int, headers: dict[str, str], parts: list[bytes]) -> None:
    assert (status, headers["content-type"]) == (503, "application/json")
    assert int(headers["retry-after"]) >= 1
    assert "worker" in api.message(json.loads(b"".join(parts)))
