"""A door on its own over several Processors: which one a request goes to, and when to another."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import ALPHABET, MODEL, InProcessProcessor, processor, worker
from millstream_testing.waiting import until
from tests.support.clients.http_api import CHAT, HI, ask
from tests.support.processor.door import InProcessDoor, door
from tests.support.wire.http_service import post, raw

LONG = {**HI, "max_tokens": 400, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(alphabet_model(tmp_path_factory.mktemp("plain") / "model"))


@contextlib.asynccontextmanager
async def two(
    model: TextModel,
) -> AsyncIterator[tuple[InProcessProcessor, InProcessProcessor, InProcessDoor]]:
    async with (
        worker(replace(ALPHABET, step_s=0.02)) as one,
        processor({MODEL: model}, [one.address]) as first,
        processor({MODEL: model}, [one.address]) as second,
        door(first.address, second.address) as served,
    ):
        await until(lambda: all(p.serving for p in served.processors.known()))
        yield first, second, served


async def test_requests_go_to_the_one_with_the_fewest(model: TextModel) -> None:
    async with two(model) as (first, second, served), contextlib.AsyncExitStack() as stack:
        for count in range(1, 5):
            wire = await stack.enter_async_context(raw(served.port))
            wire.send(post(CHAT, json.dumps(LONG).encode()))
            running = count
            await until(
                lambda running=running: (  # type: ignore[misc]
                    first.core.work.count + second.core.work.count == running
                )
            )
        assert (first.core.work.count, second.core.work.count) == (2, 2)


async def test_one_that_shuts_down_gets_none(model: TextModel) -> None:
    """It refuses them; they go to the other one."""
    async with two(model) as (first, _, served):
        first.core.work.refusing = True
        responses = [await ask(served.port, CHAT, {**HI, "max_tokens": 2}) for _ in range(4)]
    assert [response.status for response in responses] == [200] * 4


async def test_one_that_is_gone_gets_none(model: TextModel) -> None:
    async with two(model) as (first, _, served):
        await first.server.stop(0)
        asked = [ask(served.port, CHAT, {**HI, "max_tokens": 2}) for _ in range(8)]
        responses = await asyncio.gather(*asked)
    assert [response.status for response in responses] == [200] * 8


async def test_without_any_it_is_503_and_says_when_to_retry() -> None:
    async with door("127.0.0.1:1", serving=False) as served:
        response = await ask(served.port, CHAT, HI)
        assert response.status == 503
        assert int(response.headers["retry-after"]) >= 1
        assert not served.processors.serving


async def test_one_that_is_no_longer_found_ends_what_it_runs(model: TextModel) -> None:
    async with two(model) as (first, second, served), raw(served.port) as wire:
        wire.send(post(CHAT, json.dumps({**LONG, "max_tokens": 20}).encode()))
        await until(lambda: first.core.work.count + second.core.work.count == 1)
        served.processors.follow(())
        status, _, parts = await wire.response()
        assert (status, b"".join(parts)[-14:]) == (200, b"data: [DONE]\n\n")
        response = await ask(served.port, CHAT, HI)
        assert response.status == 503
        assert "no Processor is known" in response.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [({"n": -1}, "n"), ({"seed": -1}, "seed"), ({"stop": [""]}, "stop[0]")],
)
async def test_values_that_no_message_can_say_are_refused_by_name(
    model: TextModel, body: dict[str, object], param: str
) -> None:
    async with two(model) as (_, _, served):
        response = await ask(served.port, CHAT, {**HI, **body})
    assert (response.status, response.json["error"]["param"]) == (400, param)
