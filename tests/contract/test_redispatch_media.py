"""A chat with an image loses its worker: until its first token it can begin again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millstream.v1 import processor_pb2
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing import in_process
from millstream_testing.in_process import MODEL, InProcessProcessor, InProcessWorker
from millstream_testing.waiting import until
from tests.support.media import media_files
from tests.support.media.media_suite import (
    encode_worker,
    image,
    media_config,
    media_worker,
    user,
)
from tests.support.models.vision_models import make_vision_model
from tests.support.processor.chats import Conversation, options, start
from tests.support.wire.failures import refusal

RED = media_files.solid(size=(56, 56), color="red")


@contextlib.asynccontextmanager
async def _places(
    directory: Path, **config: Any
) -> AsyncIterator[tuple[InProcessProcessor, list[InProcessWorker]]]:
    """Serve a Processor over an encode worker and two that generate."""
    async with contextlib.AsyncExitStack() as parts:
        encode = await parts.enter_async_context(encode_worker(directory))
        made = media_config(directory, **config)
        workers = [await parts.enter_async_context(media_worker(made)) for _ in range(2)]
        addresses = [encode.address, *(one.address for one in workers)]
        models = {MODEL: TextModel.load(directory)}
        yield await parts.enter_async_context(in_process.processor(models, addresses)), workers


async def _asked(front: InProcessProcessor) -> Conversation:
    chat = Conversation(front.stub)
    opts = options(40, ignore_eos=True, return_token_ids=True)
    await chat.say(start(messages=[user("What is this? ", image(RED))], opts=opts))
    return chat


async def _lose(workers: list[InProcessWorker]) -> None:
    """End the worker that runs the chat."""
    running: list[InProcessWorker] = []

    async def found() -> bool:
        running[:] = [one for one in workers if (await one.engine.load()).running_requests]
        return bool(running)

    await until(found)
    await running[0].server.stop(0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model") / "qwen", "qwen2_5_vl")


async def test_the_image_is_fetched_again_before_the_first_token(directory: Path) -> None:
    async with _places(directory, prefill_s_per_token=0.02) as (front, workers):
        chat = await _asked(front)
        await _lose(workers)
        answer = await chat.answer()
        assert answer.finished
        ((way, tokens),) = [(each.way, each.token_count) for each in answer.finished.redispatches]
        assert (way, tokens) == (processor_pb2.REDISPATCH_WAY_AGAIN, 0)
        undisturbed = await (await _asked(front)).answer()
        assert answer.choices[0].token_ids == undisturbed.choices[0].token_ids
        assert answer.usage.media_tokens == undisturbed.usage.media_tokens > 0


async def test_behind_it_the_loss_is_told(directory: Path) -> None:
    """Its embedding was given back."""
    async with _places(directory, step_s=0.02) as (front, workers):
        chat = await _asked(front)
        await chat.read()
        await _lose(workers)
        assert (await refusal(chat.end())).reason == "WORKER_LOST"
