"""Conversations through the client library, with a real Processor."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from millstream.v1 import chat_pb2, generation_pb2
from millstream_client import (
    NO_RETRY,
    InvalidRequestError,
    RequestCancelledError,
    assistant,
    system,
    tool_result,
    user,
)
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import ALPHABET, InProcessProcessor, InProcessWorker, suite
from millstream_testing.waiting import until
from tests.support.clients.clients import KINDS, Kind

LENGTH = generation_pb2.FINISH_REASON_LENGTH
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
STEPPING = replace(ALPHABET, step_s=0.005)

both = pytest.mark.parametrize("kind", KINDS)


async def _nothing_runs(front: InProcessProcessor, one: InProcessWorker) -> None:
    await one.until_idle()
    await until(lambda: front.core.work.count == 0)


@both
async def test_a_conversation_remembers(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model) as (front, one), kind.connect(front.address) as client:
        conversation = client.conversation(system="S", max_new_tokens=3)
        assert (await kind.run(conversation.say("hi").answer)).text == "ABC"
        second = await kind.run(conversation.say("on", max_new_tokens=4).answer)
        assert (second.text, second.turn) == ("ABCD", 2)
        result = tool_result("c1", "42")
        third = await kind.run(conversation.tool_results([result]).answer)
        assert (third.text, third.turn) == ("ABCD", 3)
        said = [system("S"), user("hi"), assistant("ABC"), user("on"), assistant("ABCD"), result]
        assert conversation.messages == (*said, assistant("ABCD"))
        counted = await kind.run(client.tokenize, said)
        assert third.usage.prompt_tokens == len(counted.token_ids)
        await kind.run(conversation.close)
        await _nothing_runs(front, one)


@both
async def test_cancelling_a_turn_keeps_the_conversation(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model, STEPPING) as (front, one), kind.connect(front.address) as client:
        conversation = client.conversation(max_new_tokens=400)
        stream = conversation.say("hi")
        await kind.next(stream)
        await kind.run(conversation.cancel)
        first = await kind.run(stream.answer)
        assert first.finish_reason == CANCELLED
        assert 0 < len(first.text) < 400
        second = await kind.run(conversation.say("again", max_new_tokens=2).answer)
        assert (second.text, second.turn) == ("AB", 2)
        assert conversation.messages[1] == assistant(first.text)
        await kind.run(conversation.cancel)  # Nothing runs: it does nothing.
        assert (await kind.run(conversation.say("more").answer)).turn == 3
        await kind.run(conversation.close)
        await _nothing_runs(front, one)


@both
async def test_hanging_up_forgets_the_turn_and_the_next_one_reopens(
    text_model: TextModel, kind: Kind
) -> None:
    async with suite(text_model, STEPPING) as (front, one), kind.connect(front.address) as client:
        conversation = client.conversation(max_new_tokens=3)
        await kind.run(conversation.say("hi").answer)
        stream = conversation.say("long", max_new_tokens=400)
        await kind.next(stream)
        conversation.abort()
        failed = await kind.failure(stream.answer)
        assert type(failed) is RequestCancelledError
        assert failed.partial is not None
        assert failed.partial.text.startswith("A")
        await _nothing_runs(front, one)
        third = await kind.run(conversation.say("go on").answer)
        assert (third.text, third.turn) == ("ABC", 1)
        counted = await kind.run(client.tokenize, conversation.messages[:-1])
        assert third.usage.prompt_tokens == len(counted.token_ids)
        assert [m.role for m in conversation.messages] == [
            chat_pb2.CHAT_ROLE_USER,
            chat_pb2.CHAT_ROLE_ASSISTANT,
        ] * 2
        await kind.run(conversation.close)


@both
async def test_one_turn_at_a_time(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model, STEPPING) as (front, _), kind.connect(front.address) as client:
        conversation = client.conversation(max_new_tokens=400)
        stream = conversation.say("hi")
        await kind.next(stream)
        with pytest.raises(RuntimeError, match="a turn is running"):
            await kind.run(conversation.say("and").answer)
        await kind.run(conversation.cancel)
        assert (await kind.run(stream.answer)).finish_reason == CANCELLED
        await kind.run(conversation.close)


@both
async def test_a_reopened_conversation_takes_the_room_that_is_left(
    text_model: TextModel, kind: Kind
) -> None:
    config = replace(ALPHABET, context_length=64)
    async with suite(text_model, config) as (front, _), kind.connect(front.address) as client:
        conversation = client.conversation(max_new_tokens=30)
        assert len((await kind.run(conversation.say("hi").answer)).text) == 30
        conversation.abort()
        second = await kind.run(conversation.say("on").answer)
        assert (second.turn, second.finish_reason) == (1, LENGTH)
        assert 0 < second.usage.completion_tokens < 30
        assert second.usage.prompt_tokens + second.usage.completion_tokens == 64


@both
async def test_a_first_turn_that_does_not_fit_is_refused(text_model: TextModel, kind: Kind) -> None:
    async with suite(text_model) as (front, _), kind.connect(front.address) as client:
        failed = await kind.failure(client.conversation(max_new_tokens=600).say("hi").answer)
        assert type(failed) is InvalidRequestError
        assert failed.violations[0].field == "start.options.sampling.max_new_tokens"


@both
async def test_a_server_that_drains_takes_no_conversation_with_it(
    text_model: TextModel, kind: Kind
) -> None:
    """The stream ends between turns; the next turn goes on elsewhere, even without retries."""
    async with (
        suite(text_model) as (first, _),
        suite(text_model) as (second, _),
        kind.connect(f"{first.address},{second.address}", retry=NO_RETRY) as client,
    ):
        conversation = client.conversation(max_new_tokens=3)
        await kind.run(conversation.say("hi").answer)
        busy, idle = (first, second) if first.core.work.count else (second, first)
        busy.server.begin_drain()
        await busy.core.work.drain(0.0, 10.0)
        await busy.server.stop(0)
        answer = await kind.run(conversation.say("on").answer)
        assert (answer.text, answer.turn, idle.core.work.count) == ("ABC", 1, 1)
        assert len(conversation.messages) == 4
        await kind.run(conversation.close)


@both
async def test_the_turn_after_a_draining_one_opens_a_new_stream(
    text_model: TextModel, kind: Kind
) -> None:
    """The client closes its side as soon as the answer is complete, so the drain ends."""
    async with (
        suite(text_model, STEPPING) as (front, _),
        kind.connect(front.address, retry=NO_RETRY) as client,
    ):
        conversation = client.conversation(max_new_tokens=20)
        running = asyncio.ensure_future(kind.run(conversation.say("hi").answer))
        await until(lambda: front.core.work.count == 1)
        draining = asyncio.ensure_future(front.core.work.drain(0.0, 10.0))
        assert (await running).complete
        assert await draining
        await kind.run(conversation.close)
