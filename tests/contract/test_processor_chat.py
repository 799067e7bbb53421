"""Chat: one stream is one conversation. The simulated model answers with the alphabet."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from millstream.v1 import chat_pb2, generation_pb2, processor_pb2
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import ALPHABET, MODEL, suite
from millstream_testing.waiting import until
from tests.support.processor.chats import (
    CANCEL,
    Conversation,
    chat,
    message,
    options,
    start,
    tool_results,
    user_turn,
)
from tests.support.wire.failures import refusal

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
STEPPING = replace(ALPHABET, step_s=0.005)


async def _prompt_tokens(stub: Any, *messages: chat_pb2.ChatMessage) -> int:
    conversation = processor_pb2.Conversation(messages=messages)
    answer = await stub.Tokenize(processor_pb2.TokenizeRequest(conversation=conversation))
    return len(answer.token_ids)


# ---- turns


async def test_one_message_and_a_half_close_is_a_one_shot_request(text_model: TextModel) -> None:
    async with suite(text_model) as (front, one):
        answer = await chat(front.stub, "hi", opts=options(5), request_id="mine", model=MODEL)
        assert answer.text == "ABCDE"
        assert answer.finish_reason == LENGTH
        assert answer.choices[0].matched_stop is None
        assert answer.choices[0].token_count == 5
        assert answer.started == processor_pb2.TurnStarted(request_id="mine", model=MODEL)
        assert answer.usage.prompt_tokens == await _prompt_tokens(front.stub, message("hi"))
        assert answer.usage.completion_tokens == 5
        assert answer.choices[0].token_ids == []
        assert answer.choices[0].logprobs == []
        await one.until_idle()


async def test_the_model_name_may_be_left_out_and_an_id_is_made(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        first, second = [await chat(front.stub, "hi", opts=options(1)) for _ in range(2)]
        assert first.started is not None
        assert second.started is not None
        assert first.started.model == MODEL
        assert first.started.request_id
        assert first.started.request_id != second.started.request_id


async def test_a_generation_runs_to_the_end_of_the_context_if_nothing_else_says(
    text_model: TextModel,
) -> None:
    async with suite(text_model, replace(ALPHABET, context_length=64)) as (front, _):
        answer = await chat(front.stub, "hi")
        assert answer.finish_reason == LENGTH
        assert answer.usage.prompt_tokens + answer.usage.completion_tokens == 64


async def test_each_turn_has_everything_said_before_as_its_context(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(3)))
        assert (await conversation.answer(1)).text == "ABC"
        await conversation.say(user_turn("go on"))
        second = await conversation.answer(2)
        said = [message("hi"), message("ABC", chat_pb2.CHAT_ROLE_ASSISTANT), message("go on")]
        assert second.text == "ABC"
        assert second.usage.prompt_tokens == await _prompt_tokens(front.stub, *said)
        await conversation.say(user_turn("more"))
        third = await conversation.answer(3)
        said += [message("ABC", chat_pb2.CHAT_ROLE_ASSISTANT), message("more")]
        assert third.usage.prompt_tokens == await _prompt_tokens(front.stub, *said)
        assert len(await conversation.end()) == 3
        assert await conversation.call.code() is grpc.StatusCode.OK


async def test_a_turns_options_replace_the_earlier_ones_and_stay(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        conversation = Conversation(front.stub)
        await conversation.say(start("a", opts=options(3)), user_turn("b"))
        await conversation.say(user_turn("c", options(5)), user_turn("d"))
        texts = [answer.text for answer in await conversation.end()]
        assert texts == ["ABC", "ABC", "ABCDE", "ABCDE"]


async def test_a_user_turn_sent_early_waits_for_the_running_one(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, _):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(20)), user_turn("and"))
        first, second = await conversation.end()
        said = [message("hi"), message(first.text, chat_pb2.CHAT_ROLE_ASSISTANT), message("and")]
        assert first.usage.completion_tokens == second.usage.completion_tokens == 20
        assert second.usage.prompt_tokens == await _prompt_tokens(front.stub, *said)


async def test_too_many_waiting_turns_end_the_conversation(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, one):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(400)))
        await conversation.read()
        await conversation.say(*(user_turn("more") for _ in range(17)))
        failed = await refusal(conversation.end())
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.fields == ("user_turn",)
        await one.until_idle()


async def test_tool_results_start_the_next_turn(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        call = chat_pb2.ToolCall(id="c1", name="sum", arguments_json='{"a": 1}')
        asked = message("calling", chat_pb2.CHAT_ROLE_ASSISTANT, tool_calls=[call])
        result = message("42", chat_pb2.CHAT_ROLE_TOOL, tool_call_id="c1")
        conversation = Conversation(front.stub)
        await conversation.say(start(messages=[message("sum"), asked, result], opts=options(2)))
        await conversation.answer(1)
        await conversation.say(tool_results(result))
        second = await conversation.answer(2)
        said = [message("sum"), asked, result, message("AB", chat_pb2.CHAT_ROLE_ASSISTANT), result]
        assert second.usage.prompt_tokens == await _prompt_tokens(front.stub, *said)
        await conversation.end()


async def test_only_choice_0_goes_into_the_context(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(3, n=3)), user_turn("go on", options(1)))
        first, second = await conversation.end()
        said = [message("hi"), message("ABC", chat_pb2.CHAT_ROLE_ASSISTANT), message("go on")]
        assert len(first.choices) == 3
        assert second.usage.prompt_tokens == await _prompt_tokens(front.stub, *said)


# ---- cancel


async def test_cancel_before_the_first_token(text_model: TextModel) -> None:
    async with suite(text_model, replace(ALPHABET, prefill_s_per_token=60.0)) as (front, one):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi"))
        await one.until_running(1)
        await conversation.say(CANCEL)
        answer = await conversation.answer()
        assert answer.finish_reason == CANCELLED
        assert answer.text == ""
        assert answer.usage.completion_tokens == 0
        assert answer.usage.prompt_tokens == await _prompt_tokens(front.stub, message("hi"))
        await one.until_idle()
        await conversation.end()


async def test_cancel_sent_together_with_the_start(text_model: TextModel) -> None:
    async with suite(text_model, replace(ALPHABET, prefill_s_per_token=60.0)) as (front, one):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi"), CANCEL)
        assert (await conversation.answer()).finish_reason == CANCELLED
        await one.until_idle()


async def test_cancel_of_a_running_turn_keeps_the_conversation(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, one):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(400)))
        await conversation.read()
        await conversation.say(CANCEL, CANCEL)
        first = await conversation.answer(1)
        assert first.finish_reason == CANCELLED
        assert first.choices[0].matched_stop is None
        assert "ABCDEFG".startswith(first.text[:7])
        assert 0 < first.usage.completion_tokens < 400
        assert first.usage.completion_tokens == first.choices[0].token_count
        await one.until_idle()
        await conversation.say(user_turn("again", options(2)))
        second = await conversation.answer(2)
        said = [message("hi"), message(first.text, chat_pb2.CHAT_ROLE_ASSISTANT), message("again")]
        assert second.text == "AB"
        assert second.usage.prompt_tokens == await _prompt_tokens(front.stub, *said)
        await conversation.end()


async def test_cancel_without_a_running_turn_does_nothing(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(3)))
        await conversation.answer(1)
        await conversation.say(CANCEL)
        await conversation.say(user_turn("more"))
        assert (await conversation.answer(2)).text == "ABC"
        await conversation.say(CANCEL)
        await conversation.end()
        assert await conversation.call.code() is grpc.StatusCode.OK


async def test_a_cancel_right_after_a_turn_cancels_that_turn(text_model: TextModel) -> None:
    async with suite(text_model, replace(ALPHABET, prefill_s_per_token=0.005)) as (front, one):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(1)))
        for turn in range(2, 12):
            await conversation.answer(turn - 1)
            await conversation.say(user_turn("long", options(100)), CANCEL)
            assert (await conversation.answer(turn)).finish_reason == CANCELLED
        await one.until_idle()


async def test_cancel_stops_the_running_turn_and_not_the_waiting_one(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, _):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(400)))
        await conversation.read()
        await conversation.say(user_turn("more", options(3)), CANCEL)
        first, second = await conversation.end()
        assert first.finish_reason == CANCELLED
        assert second.finish_reason == LENGTH
        assert second.text == "ABC"


# ---- the end of an RPC


async def test_half_close_without_a_start_is_refused(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        failed = await refusal(Conversation(front.stub).end())
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (failed.reason, failed.fields) == ("INVALID_REQUEST", ("start",))


async def test_something_else_first_is_refused(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        for first in (user_turn("hi"), CANCEL, processor_pb2.ChatRequest()):
            conversation = Conversation(front.stub)
            await conversation.say(first)
            failed = await refusal(conversation.end())
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
            assert failed.fields == ("start",)


async def test_a_second_start_ends_the_conversation_and_the_turn(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, one):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(400)))
        await conversation.read()
        await conversation.say(start("hi"))
        failed = await refusal(conversation.end())
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (failed.reason, failed.fields) == ("INVALID_REQUEST", ("start",))
        await one.until_idle()


async def test_an_empty_message_later_ends_the_conversation(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(1)))
        await conversation.answer()
        await conversation.say(processor_pb2.ChatRequest())
        failed = await refusal(conversation.end())
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.fields == ("message",)


@pytest.mark.parametrize("prefill_s", [0.0, 60.0])
async def test_cancelling_the_rpc_frees_the_engine(text_model: TextModel, prefill_s: float) -> None:
    config = replace(STEPPING, prefill_s_per_token=prefill_s)
    async with suite(text_model, config) as (front, one):
        conversations = [Conversation(front.stub) for _ in range(10)]
        for conversation in conversations:
            await conversation.say(start("hi", opts=options(400)))
        await one.until_running(10)
        for conversation in conversations:
            conversation.call.cancel()
        await one.until_idle()
        await until(lambda: front.core.work.count == 0)


@pytest.mark.parametrize("prefill_s", [0.0, 60.0])
async def test_the_rpcs_deadline_frees_the_engine(text_model: TextModel, prefill_s: float) -> None:
    config = replace(STEPPING, prefill_s_per_token=prefill_s)
    async with suite(text_model, config) as (front, one):
        conversation = Conversation(front.stub, timeout=0.3)
        await conversation.say(start("hi", opts=options(400)))
        failed = await refusal(conversation.end())
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert failed.reason in ("", "DEADLINE_EXCEEDED")  # whoever noticed first
        await one.until_idle()
        await until(lambda: front.core.work.count == 0)


async def test_a_client_that_leaves_while_its_turn_waits_frees_the_engine(
    text_model: TextModel,
) -> None:
    async with suite(text_model) as (front, one):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(2)))
        await conversation.answer()
        conversation.call.cancel()
        await until(lambda: front.core.work.count == 0)
        await one.until_idle()


async def test_a_shutdown_is_told_between_two_turns(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(2)))
        await conversation.answer()
        draining = asyncio.ensure_future(front.core.work.drain(0.0, 10.0))
        told = await conversation.call.read()
        assert told == processor_pb2.ChatResponse(turn=1, draining=processor_pb2.ServerDraining())
        assert len(await conversation.end()) == 1
        assert await draining


async def test_a_shutdown_is_told_with_the_running_turn(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, _):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(10)))
        await conversation.read()
        draining = asyncio.ensure_future(front.core.work.drain(0.0, 10.0))
        (answer,) = await conversation.end()
        assert (answer.draining, answer.usage.completion_tokens) == (True, 10)
        assert await draining
