"""What of a request's text runs on the event loop, and what in the text threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.v1 import processor_pb2
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.responses import add_token_ids
from millstream_server.processor.text.messages import (
    DEFAULT_PATHS,
    ChatMessage,
    ChatRole,
    Tool,
    ToolCall,
)
from millstream_server.runtime.work.fair_queue import PoolLimits

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


async def test_many_token_ids_keep_their_order() -> None:
    ids = list(range(50_000))
    response = processor_pb2.TokenizeResponse()
    await add_token_ids(response.token_ids, ids)
    assert response.token_ids == list(range(50_000))
    assert not ids
