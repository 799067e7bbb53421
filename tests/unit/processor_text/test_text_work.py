"""What of a request's text runs on the event loop, and what in the pool."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream.v1 import processor_pb2
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.responses import add_token_ids
from millstream_server.processor.text.long_texts import Floor
from millstream_server.processor.text.messages import (
    DEFAULT_PATHS,
    ChatMessage,
    ChatRole,
    Tool,
    ToolCall,
)
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.work.fair_queue import PoolLimits
from tests.support.models.models import make_random_model

USER = ChatMessage(ChatRole.USER, "Hello")
CALL = ToolCall("c", "now", "{}")


class Text:
    """A `TextModel` that notes where it is called; its template returns what it is told."""

    def __init__(self, rendered: str) -> None:
        self.places: list[str] = []
        self.chat_template = SimpleNamespace(render=self._render)
        self._rendered = rendered

    def _render(self, *_: Any, **__: Any) -> str:
        self._note()
        return self._rendered

    def encode(self, _: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self._note()
        return [1]

    def _note(self) -> None:
        name = threading.current_thread().name
        self.places.append("thread" if name.startswith("work-") else "loop")


@pytest.fixture
def prompts() -> Iterator[Prompts]:
    made = Prompts(PoolLimits())
    yield made
    made.close()


@pytest.mark.parametrize(
    ("messages", "tools", "rendered", "places"),
    [
        ([USER], [], "Hello", ["loop", "loop"]),
        ([USER], [], "x" * 5000, ["loop", "thread"]),
        ([ChatMessage(ChatRole.USER, "x" * 1025)], [], "", ["thread", "thread"]),
        ([USER, ChatMessage(ChatRole.TOOL, "", tool_call_id="x" * 1025)], [], "", ["thread"] * 2),
        ([USER], [Tool("now", "", "")], "", ["thread", "thread"]),
        ([ChatMessage(ChatRole.ASSISTANT, "", tool_calls=(CALL,)), USER], [], "", ["thread"] * 2),
    ],
)
async def test_only_short_work_holds_the_event_loop(
    prompts: Prompts,
    messages: list[ChatMessage],
    tools: list[Tool],
    rendered: str,
    places: list[str],
) -> None:
    text: Any = Text(rendered)
    assert await prompts.of_chat(text, messages, tools, DEFAULT_PATHS) == (rendered, [1])
    assert text.places == places


async def test_a_prompt_that_surely_is_too_long_is_not_tokenized(prompts: Prompts) -> None:
    text: Any = Text("a " * 5000)
    text.floor = Floor(words=True, longest=None, composes=False)
    long = ChatMessage(ChatRole.USER, "a " * 5000)
    with pytest.raises(InvalidRequestError, match="exceeds the context length of 4000 tokens"):
        await prompts.of_chat(text, [long], [], DEFAULT_PATHS, most=4000)
    with pytest.raises(InvalidRequestError, match="exceeds the context length of 4000 tokens"):
        await prompts.tokenize(text, "a " * 5000, special_tokens=False, most=4000)
    assert text.places == ["thread"]  # that it was rendered
    assert await prompts.of_chat(text, [long], [], DEFAULT_PATHS, most=5000) == ("a " * 5000, [1])


async def test_long_texts_that_cannot_be_cut_are_tokenized_one_at_a_time(tmp_path: Path) -> None:
    model = TextModel.load(make_random_model(tmp_path / "tiny"))
    running, beside = [0], threading.Event()

    class Counting:
        def encode_batch_fast(self, texts: list[str], **_: object) -> Any:
            running[0] += 1
            if running[0] > 1:
                beside.set()
            beside.wait(0.5)  # for the other, which must not come
            running[0] -= 1
            return model.tokenizer.encode_batch_fast([each[:10] for each in texts])

    uncut = replace(model, tokenizer=cast("Any", Counting()), frame=None)
    encode = partial(uncut.encode, "x" * 200_000, add_special_tokens=False)
    await asyncio.gather(*(asyncio.to_thread(encode) for _ in range(2)))
    assert not beside.is_set()


async def test_many_token_ids_keep_their_order() -> None:
    ids = list(range(50_000))
    response = processor_pb2.TokenizeResponse()
    await add_token_ids(response.token_ids, ids)
    assert response.token_ids == list(range(50_000))
    assert not ids
