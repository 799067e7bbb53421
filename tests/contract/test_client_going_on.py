"""A Processor is lost in the middle of an answer: the client goes on at another one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from millstream.v1 import chat_pb2, processor_pb2, sampling_pb2
from millstream_client import Client, Retry, UnavailableError
from millstream_client.answers import Answer
from millstream_client.going_on import can_go_on
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import ALPHABET, MODEL, InProcessProcessor, processor, worker

SLOW = replace(ALPHABET, step_s=0.02)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


CALLED = [chat_pb2.ChatTool(name="f", strict=True)]
USED_UP = processor_pb2.GenerationOptions(sampling=sampling_pb2.SamplingParams(max_new_tokens=2))
REQUIRED = processor_pb2.ToolChoice(mode=processor_pb2.TOOL_CHOICE_MODE_REQUIRED)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": CALLED},
        {"tool_choice": REQUIRED},
        {"tool_choice": processor_pb2.ToolChoice(name="f")},
        {"reasoning": processor_pb2.ReasoningOptions(max_tokens=9)},
        {"options": USED_UP},
    ],
)
def test_a_grammar_of_the_servers_or_a_used_budget_keeps_it_from_going_on(
    fields: dict[str, Any],
) -> None:
    answer = Answer()
    answer.add(
        processor_pb2.ChatResponse(choices=[processor_pb2.ChoiceDelta(text="so", token_count=2)])
    )
    assert can_go_on(processor_pb2.ChatStart(), answer)
    assert not can_go_on(processor_pb2.ChatStart(**fields), answer)


def test_no_more_of_the_prompt_is_cached_than_it_has() -> None:
    """The last server has found what came before in its cache, too: it was in its prompt."""
    answer = Answer(resumed_after=[4])
    last = processor_pb2.ChatResponse()
    last.finished.usage.prompt_tokens, last.finished.usage.cached_tokens = 14, 12
    answer.add(last)
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (10, 10)


@contextlib.asynccontextmanager
async def two(
    text_model: TextModel, **given: Any
) -> AsyncIterator[tuple[Client, list[InProcessProcessor]]]:
    models = {MODEL: text_model}
    async with (
        worker(SLOW) as one,
        processor(models, [one.address]) as first,
        processor(models, [one.address]) as second,
        Client(f"{first.address},{second.address}", **given) as client,
    ):
        yield client, [first, second]


async def lose_after(stream: Any, letters: int, fronts: list[InProcessProcessor]) -> str:
    """Read so many letters, end the Processor that made them, read on; return the whole text."""
    text = ""
    async for delta in stream:
        text += delta.text
        if len(text) >= letters and len(fronts) == 2:
            (busy,) = [front for front in fronts if front.core.work.count]
            fronts.remove(busy)
            await busy.server.stop(0)
    return text


async def test_a_chat_goes_on_without_a_gap_or_a_repeat(text_model: TextModel) -> None:
    async with two(text_model) as (client, fronts):
        stream = client.chat("hi", max_new_tokens=20, temperature=0)
        assert await lose_after(stream, 5, fronts) == LETTERS[:20]
        answer = stream.result
        assert answer.text == LETTERS[:20]
        assert answer.complete
        (after,) = answer.resumed_after
        assert 5 <= after < 20
        assert answer.usage.completion_tokens == 20


async def test_a_completion_of_token_ids_goes_on_exactly(text_model: TextModel) -> None:
    async with two(text_model) as (client, fronts):
        stream = client.complete([34], max_new_tokens=20, temperature=0, return_token_ids=True)
        assert await lose_after(stream, 5, fronts) == LETTERS[:20]
        assert stream.result.choices[0].token_ids == list(range(35, 55))
        assert stream.result.usage.completion_tokens == 20
        assert stream.result.usage.prompt_tokens == 1


@pytest.mark.parametrize(
    ("knobs", "given"),
    [
        ({"n": 2}, {}),
        ({"stop": ["Z"]}, {}),
        ({"logprobs": {"top": 1}}, {}),
        ({"frequency_penalty": 0.5}, {}),
        ({}, {"retry": Retry(go_on=False)}),
        ({}, {"retry": Retry(attempts=1)}),
    ],
)
async def test_what_would_not_be_right_is_told(
    text_model: TextModel, knobs: dict[str, Any], given: dict[str, Any]
) -> None:
    async with two(text_model, **given) as (client, fronts):
        stream = client.chat("hi", max_new_tokens=20, temperature=0, **knobs)
        with pytest.raises(UnavailableError) as caught:
            await lose_after(stream, 5, fronts)
        assert caught.value.partial is not None
        assert caught.value.partial.text == LETTERS[: len(caught.value.partial.text)]
