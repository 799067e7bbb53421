"""/v1/models, by both vendors' clients."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import openai
import pytest
import pytest_asyncio

from millstream_server.processor.models import ModelNames
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import (
    CONTEXT_LENGTH,
    MODEL,
    InProcessProcessor,
    processor,
    worker,
)
from tests.support.clients.http_api import client

ALIAS = "org/other name"


@pytest_asyncio.fixture
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InProcessProcessor]:
    model = TextModel.load(alphabet_model(tmp_path_factory.mktemp("plain") / "model"))
    names = ModelNames(aliases={ALIAS: MODEL})
    async with (
        worker() as one,
        processor({MODEL: model}, [one.address], names=names) as served,
    ):
        yield served


async def test_openais_client_lists_and_finds_them(front: InProcessProcessor) -> None:
    async with client(front.address) as api:
        listed = (await api.models.list()).data
        found = [await api.models.retrieve(model.id) for model in listed]
        assert found == listed
        with pytest.raises(openai.NotFoundError, match="GET /v1/models names those"):
            await api.models.retrieve("none")
    assert [(each.id, each.owned_by) for each in listed] == [
        (MODEL, "millstream"),
        (ALIAS, "millstream"),
    ]
    assert [each.model_extra["root"] for each in listed if each.model_extra] == [MODEL, MODEL]
    assert listed[0].model_extra is not None
    assert listed[0].model_extra["max_model_len"] == CONTEXT_LENGTH


async def test_anthropics_client_does_too(front: InProcessProcessor) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=f"http://{front.address}", api_key="any", _strict_response_validation=True
    ) as api:
        listed = [model async for model in api.models.list()]
        assert await api.models.retrieve(ALIAS) == listed[1]
    assert [(each.id, each.type, each.display_name) for each in listed] == [
        (MODEL, "model", MODEL),
        (ALIAS, "model", ALIAS),
    ]


async def test_codex_finds_the_list_that_it_reads(front: InProcessProcessor) -> None:
    async with client(front.address) as api:
        found = await api.get("/models", cast_to=dict, options={"params": {"client_version": "1"}})
    assert found["models"] == []
    assert len(found["data"]) == 2
