"""What Parse holds of an answer: bounded by its bytes, however small its tokens and calls are."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.v1 import processor_pb2
from millstream_server.formats.choosing import AnswerFormat
from millstream_server.formats.families import FORMATS
from millstream_server.processor.answer import reading_of
from millstream_server.processor.parse import ParsedAnswer
from millstream_server.processor.text.messages import Tool
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool
from tests.support.models.models import make_random_model

MOST = 40
"""Bytes held for a byte that was sent."""
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
ARGUMENT = '<tool_call>\n{"name": "f", "arguments": {"a": "'
TOOL = Tool("f", "", '{"type": "object", "properties": {"a": {"type": "string"}}}')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder: Path = make_random_model(tmp_path_factory.mktemp("models") / "tiny")
    return TextModel.load(folder)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "text",
    ["hello world, " * 10_000, ARGUMENT + "hello world, " * 10_000, CALL * 3000],
    ids=["text", "argument", "calls"],
)
async def test_token_ids_are_held_in_at_most_40_times_their_bytes(
    model: TextModel, text: str
) -> None:
    ids = list(model.encode(text, add_special_tokens=False))
    request = processor_pb2.ParseRequest(token_ids=processor_pb2.TokenIds(ids=ids))
    pool = WorkPool(PoolLimits())
    how = AnswerFormat(form=FORMATS["hermes"], reason="", hidden={})
    answer = ParsedAnswer(model, reading_of(how, [TOOL], "", one_call=False), pool)
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    events = await answer.add_ids(request.token_ids.ids, "token_ids")
    _, peak = tracemalloc.get_traced_memory()
    assert events
    assert (peak - before) / request.ByteSize() < MOST
    pool.close()


@pytest.mark.parametrize(("events", "where"), [(256, "MainThread"), (257, "work-")])
async def test_many_events_are_converted_in_the_pool(
    model: TextModel, events: int, where: str
) -> None:
    pool = WorkPool(PoolLimits())
    how = AnswerFormat(form=FORMATS["hermes"], reason="", hidden={})
    answer = ParsedAnswer(model, reading_of(how, [TOOL], "", one_call=False), pool)
    name = await answer.converted(lambda: threading.current_thread().name, events)
    assert name.startswith(where)
    await answer.add_text(CALL * 100, "text")
    name = await answer.converted(lambda: threading.current_thread().name)
    assert name.startswith("work-")
    pool.close()
