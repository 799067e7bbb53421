"""What the door writes, a Processor reads as what the endpoint had read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_server.door import wire
from millstream_server.generation.request import LogprobOptions
from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.media.items import Modality
from millstream_server.processor import convert
from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.conversation import Completion, Conversation, Options, UserTurn
from millstream_server.processor.media.uploads import MediaBudget, Uploads
from millstream_server.processor.text.messages import (
    ChatMessage,
    ChatRole,
    MediaPart,
    Tool,
    ToolCall,
)
from millstream_server.processor.text.switches import asked_of, reasoning
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.priority import Priority

OPTIONS = Options(
    path="",
    sampling={
        "temperature": 0.5,
        "max_new_tokens": 7,
        "seed": 3,
        "stop_token_ids": (1, 2),
        "logit_bias": {4: 0.5},
        "constraint": Constraint(ConstraintKind.REGEX, "a+"),
    },
    logprobs=LogprobOptions(top=2),
    priority=Priority.HIGH,
    n=2,
    stops=("x", "y"),
    min_interval_s=0.25,
    include_special_tokens=True,
    session="s",
    cache_salt="c",
)
ANSWERS = AnswerOptions(
    events=None,
    one_call=True,
    must_call=True,
    only="f",
    reasoning_tokens=5,
    switches=reasoning(("a", True), ("b", "high")),
    if_known=True,
)
READ = replace(OPTIONS, path="start.options.", describe_start=True)


def _conversation() -> Conversation:
    budget = MediaBudget(1 << 20)
    return Conversation(lambda: Uploads(budget, 1 << 20), OpenWork())


def _without_places(message: ChatMessage) -> Any:
    parts = [
        part if isinstance(part, str) else (part.modality, part.data, part.url)
        for part in message.parts
    ]
    return parts, replace(message, field="", parts=())


@pytest.fixture
async def asked() -> Conversation:
    conversation = _conversation()
    conversation.model, conversation.request_id = "tiny", "mine"
    conversation.tools = [Tool("f", "does", '{"type": "object"}', strict=True), Tool("g", "", "")]
    conversation.answers = ANSWERS
    image = MediaPart(Modality.IMAGE, "here", data=b"png")
    video = MediaPart(Modality.VIDEO, "there", url="https://host/v.mp4")
    messages = (
        ChatMessage(ChatRole.DEVELOPER, "be brief"),
        ChatMessage(ChatRole.USER, "see", parts=("see", image, video), name="ann"),
        ChatMessage(ChatRole.ASSISTANT, "", (ToolCall("1", "f", "{}"),), reasoning="hm"),
        ChatMessage(ChatRole.TOOL, "done", tool_call_id="1"),
    )
    conversation.add(UserTurn(messages, OPTIONS, "messages"))
    await conversation.next_turn()
    return conversation


async def test_a_chat(asked: Conversation) -> None:
    read = _conversation()
    convert.begin(read, wire.start_of(asked))
    await read.next_turn()
    assert (read.model, read.request_id) == ("tiny", "mine")
    assert list(read.tools) == list(asked.tools)
    assert read.options == READ
    assert [*map(_without_places, read.messages)] == [*map(_without_places, asked.messages)]
    (_, enabled), (_, effort) = asked_of(read.answers.switches)
    assert (enabled, effort) == (True, "high")
    # With a bound of its reasoning an answer is read in any case.
    assert replace(read.answers, switches={}) == replace(ANSWERS, switches={}, events=True)


@pytest.mark.parametrize("answers", [{"with_tools": False}, {"must_call": True}, {}])
async def test_a_choice_of_tools(asked: Conversation, answers: dict[str, Any]) -> None:
    asked.answers = AnswerOptions(events=None, switches={}, **answers)
    read = _conversation()
    convert.begin(read, wire.start_of(asked))
    assert read.answers == asked.answers


@pytest.mark.parametrize("prompt", ["a text", [1, 2, 3], ""])
def test_a_completion(prompt: str | list[int]) -> None:
    asked = Completion(model="tiny", request_id="mine", prompt=prompt, options=OPTIONS)
    read = convert.completion_from_proto(wire.completion_of(asked))
    assert read == replace(asked, options=replace(READ, path="options."))


def test_what_no_message_can_say_is_refused() -> None:
    asked = Completion(model="tiny", request_id="mine", prompt="x", options=replace(OPTIONS, n=-1))
    with pytest.raises(InvalidRequestError, match="can't be sent"):
        wire.sendable(lambda: wire.completion_of(asked))
