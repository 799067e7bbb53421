"""A chat by HTTP whose worker is lost: it goes on, or its client is told not to send it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import (
    ALPHABET,
    MODEL,
    InProcessProcessor,
    InProcessWorker,
    processor,
    worker,
)
from millstream_testing.waiting import until
from tests.support.clients.http_api import CHAT, HI, ask, client

SLOW = replace(ALPHABET, step_s=0.02)
LONG: Any = {**HI, "max_tokens": 80}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(alphabet_model(tmp_path_factory.mktemp("plain") / "model"))


@contextlib.asynccontextmanager
async def places(
    model: TextModel, count: int
) -> AsyncIterator[tuple[InProcessProcessor, list[InProcessWorker]]]:
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(worker(SLOW)) for _ in range(count)]
        addresses = [one.address for one in workers]
        yield await stack.enter_async_context(processor({MODEL: model}, addresses)), workers


async def lose(workers: list[InProcessWorker]) -> None:
    """End the worker that runs something."""
    running: list[InProcessWorker] = []

    async def found() -> bool:
        running[:] = [one for one in workers if (await one.engine.load()).running_requests]
        return bool(running)

    await until(found)
    workers.remove(running[0])
    await running[0].server.stop(0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_goes_on(model: TextModel, *, stream: bool) -> None:
    async with places(model, 2) as (front, workers), client(front.address) as api:
        undisturbed = await api.chat.completions.create(**LONG)
        expected = undisturbed.choices[0].message.content
        asked = asyncio.ensure_future(_answer(api, stream=stream))
        await lose(workers)
        assert await asked == (expected, 80)


async def _answer(api: openai.AsyncOpenAI, *, stream: bool) -> tuple[str, int]:
    if not stream:
        whole = await api.chat.completions.create(**LONG)
        assert whole.usage
        return whole.choices[0].message.content or "", whole.usage.completion_tokens
    texts, tokens = [], 0
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await api.chat.completions.create(**LONG, **options):
        texts += [choice.delta.content or "" for choice in chunk.choices]
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return "".join(texts), tokens


async def test_what_loses_two_workers_is_not_to_be_sent_again(model: TextModel) -> None:
    """Else the client's library sends it to the third one, and so on."""
    async with places(model, 3) as (front, workers):
        asked = asyncio.ensure_future(ask(front.port, CHAT, {**HI, "max_tokens": 400}))
        await lose(workers)
        await lose(workers)
        response = await asked
        assert (response.status, response.json["error"]["code"]) == (409, "repeated_loss")
        assert response.headers["x-should-retry"] == "false"
