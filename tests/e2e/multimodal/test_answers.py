"""What requests with text have, those with pictures have too, aggregated and handed off alike."""

from __future__ import annotations

import re
from typing import Any

import pytest

from millstream.v1 import generation_pb2, processor_pb2, sampling_pb2
from tests.e2e.multimodal.conftest import Suite
from tests.support.media.vision_chats import NEW_TOKENS, Question, ask, case_of, check, photo
from tests.support.processor.chats import Conversation, options, start, user_turn

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_PICTURE = photo(96, 64, seed=10)
_QUESTION = Question.of("What is this? ", _PICTURE, " Answer.")


async def test_a_stop_string_ends_the_answer_and_is_not_in_it(either: Any) -> None:
    whole = await ask(either, _QUESTION, 40)
    plain = re.findall("[!-~]{3}", whole.text)  # no half characters
    stop = plain[len(plain) // 2]
    cut = await ask(either, _QUESTION, 40, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    choice = cut.choices[0]
    assert choice.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert choice.matched_stop is not None
    assert choice.matched_stop.text == stop
    assert choice.token_ids == whole.choices[0].token_ids[: len(choice.token_ids)]
    assert cut.usage.completion_tokens == len(choice.token_ids) < 40


async def test_a_single_token(suite: Suite, either: Any) -> None:
    answer = await ask(either, _QUESTION, 1)
    check(answer, _QUESTION.case(suite.model, 1))
    assert answer.finish_reason == generation_pb2.FINISH_REASON_LENGTH


async def test_logprobs(suite: Suite, either: Any) -> None:
    answer = await ask(either, _QUESTION, logprobs=sampling_pb2.LogprobOptions(top=2))
    check(answer, _QUESTION.case(suite.model))
    entries = answer.choices[0].logprobs
    assert [entry.token_id for entry in entries] == answer.choices[0].token_ids
    assert all(len(entry.top) == 2 for entry in entries)
    assert all(entry.top[0].token_id == entry.token_id for entry in entries), "greedy is the top"


async def test_two_choices(suite: Suite, either: Any) -> None:
    case = _QUESTION.case(suite.model)
    answer = await ask(either, _QUESTION, n=2)
    assert [answer.choices[index].token_ids for index in (0, 1)] == [case.token_ids] * 2
    assert answer.usage.prompt_tokens == len(case.prompt)
    assert answer.usage.media_tokens == case.prompt.media_tokens
    assert answer.usage.completion_tokens == 2 * NEW_TOKENS


async def test_later_turns_see_earlier_pictures_and_bring_their_own(
    suite: Suite, either: Any
) -> None:
    opts = options(NEW_TOKENS, temperature=0, ignore_eos=True, return_token_ids=True)
    third = Question.of("And beside ", photo(64, 96, seed=11), "?")
    chat = Conversation(either)
    await chat.say(start(messages=[_QUESTION.message], opts=opts))
    told: list[dict[str, Any]] = [{"role": "user", "content": _QUESTION.content}]
    first = await chat.answer()
    check(first, case_of(suite.model, told, [_PICTURE]))
    await chat.say(user_turn("And then?"))
    told += [said(first.text), {"role": "user", "content": "And then?"}]
    second = await chat.answer(2)
    check(second, case_of(suite.model, told, [_PICTURE]))
    turn = processor_pb2.UserTurn(content=third.message.content)
    await chat.say(processor_pb2.ChatRequest(user_turn=turn))
    told += [said(second.text), {"role": "user", "content": third.content}]
    check(await chat.answer(3), case_of(suite.model, told, [_PICTURE, *third.parts]))
    await chat.end()


def said(text: str) -> dict[str, Any]:
    """Make the assistant's turn."""
    return {"role": "assistant", "content": text}
