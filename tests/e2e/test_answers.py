"""What the Processor makes of real SGLang's output, aggregated and through a hand-off alike."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import jsonschema
import pytest

from millstream.v1 import (
    chat_pb2,
    generation_pb2,
    processor_pb2,
    processor_pb2_grpc,
    sampling_pb2,
)
from tests.e2e.conftest import Suite
from tests.support.processor.chats import (
    Answer,
    Conversation,
    chat,
    completion,
    gather,
    message,
    options,
    start,
    user_turn,
)
from tests.support.wire.failures import refusal

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

STOP = generation_pb2.FINISH_REASON_STOP
TOOL_CALLS = generation_pb2.FINISH_REASON_TOOL_CALLS
_PROMPT = [20 + (7 * i) % 900 for i in range(30)]
_GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(params=["front_aggregated", "front_disaggregated"])
async def stub(request: pytest.FixtureRequest, suite: Suite) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(getattr(suite, request.param).address) as channel:
        yield processor_pb2_grpc.ProcessorServiceStub(channel)


async def _complete(stub: Any, max_new_tokens: int, **knobs: Any) -> Answer:
    opts = options(max_new_tokens, **{**_GREEDY, **knobs})
    return await gather(stub.Complete(completion(_PROMPT, opts)))


async def test_a_stop_string_ends_the_answer_and_is_not_in_it(stub: Any) -> None:
    whole = await _complete(stub, 40)
    stop = whole.text[len(whole.text) // 2 :][:5]
    cut = await _complete(stub, 40, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    choice = cut.choices[0]
    assert choice.finish_reason == STOP
    assert choice.matched_stop is not None
    assert choice.matched_stop.text == stop
    assert choice.token_ids == whole.choices[0].token_ids[: len(choice.token_ids)]
    assert cut.usage.completion_tokens == len(choice.token_ids) < 40


_CALLS = 10
_SPOKEN = (
    r"<think>[a-z]{1,9}</think>\n\n[a-z]{1,9}\n<tool_call>\n"
    r'\{"name": "f", "arguments": \{"s": "[a-z]{1,20}", "n": [1-9][0-9]{0,5}\}\}\n</tool_call>'
)


async def test_a_call_is_told_apart_from_reasoning_and_text(stub: Any) -> None:
    spoken = {"type": "structural_tag", "format": {"type": "regex", "pattern": _SPOKEN}}
    constraint = sampling_pb2.Constraint(structural_tag=json.dumps(spoken))
    opts = options(200, constraint=constraint, return_token_ids=True)
    output = processor_pb2.CHAT_OUTPUT_EVENTS
    answer = await chat(stub, "hi", tools=[chat_pb2.ChatTool(name="f")], output=output, opts=opts)
    choice = answer.choices[0]
    kinds = [event.WhichOneof("event") for event in choice.events]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        "reasoning",
        "text",
        "tool_call_start",
        "tool_call_arguments_json",
        "tool_call_end",
    ]
    (call,) = choice.tool_calls
    assert (call.name, call.incomplete) == ("f", False)
    assert json.loads(call.arguments_json).keys() == {"s", "n"}
    assert answer.finish_reason == TOOL_CALLS
    assert 2 <= answer.usage.reasoning_tokens < answer.usage.completion_tokens == choice.token_count


async def test_render_complete_parse_is_chat(stub: Any) -> None:
    constraint = sampling_pb2.Constraint(regex=_SPOKEN)
    asked = start(
        "hi",
        tools=[chat_pb2.ChatTool(name="f")],
        output=processor_pb2.CHAT_OUTPUT_EVENTS,
        opts=options(200, temperature=0, constraint=constraint, return_token_ids=True),
    )
    conversation = Conversation(stub)
    await conversation.say(asked)
    chatted = await conversation.answer()
    await conversation.end()
    rendered = await stub.Render(processor_pb2.RenderRequest(start=asked.start))
    request = processor_pb2.CompleteRequest(
        token_ids=processor_pb2.TokenIds(ids=rendered.token_ids),
        options=processor_pb2.GenerationOptions(sampling=rendered.sampling, return_token_ids=True),
    )
    token_ids = [i async for r in stub.Complete(request) for c in r.choices for i in c.token_ids]
    assert token_ids == chatted.choices[0].token_ids
    said = processor_pb2.ParseRequest(
        reading=rendered.reading, token_ids=processor_pb2.TokenIds(ids=token_ids)
    )
    *parts, last = [response async for response in stub.Parse(iter([said]))]
    events = [event for response in [*parts, last] for event in response.events]
    assert _joined(events) == _joined(chatted.choices[0].events)
    (call,), (wanted,) = last.finished.tool_calls, chatted.choices[0].tool_calls
    assert (call.name, call.arguments_json) == (wanted.name, wanted.arguments_json)
    assert last.finished.reasoning_tokens == chatted.usage.reasoning_tokens


def _joined(events: Iterable[processor_pb2.OutputEvent]) -> list[tuple[str | None, str]]:
    """Join the pieces of a kind that follow each other."""
    kinds = itertools.groupby(events, lambda event: event.WhichOneof("event"))
    texts = ("text", "reasoning", "tool_call_arguments_json")
    return [
        (kind, "".join(getattr(event, kind) for event in run) if kind in texts else "")
        for kind, run in kinds
    ]


_WEATHER = {
    "type": "object",
    "properties": {
        # ASCII: this model draws letters at random, and xgrammar takes overlong UTF-8 for one.
        "city": {"type": "string", "pattern": "^[A-Za-z ]{1,8}$"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}


_BUDGET = processor_pb2.ReasoningOptions(max_tokens=5)
"""A model that draws its tokens at random would seldom end its reasoning."""


async def test_required_calls_fit_their_schema(stub: Any) -> None:
    tools = [
        chat_pb2.ChatTool(name=name, parameters_json_schema=json.dumps(_WEATHER))
        for name in ("weather", "forecast")
    ]
    named = processor_pb2.ToolChoice(mode=processor_pb2.TOOL_CHOICE_MODE_NAMED, name="forecast")
    answers = await asyncio.gather(
        *(
            chat(
                stub,
                f"What is the weather? {number}",
                tools=tools,
                tool_choice=named,
                parallel_tool_calls=False,
                reasoning=_BUDGET,
                output=processor_pb2.CHAT_OUTPUT_EVENTS,
                opts=options(300, temperature=1),
            )
            for number in range(_CALLS)
        )
    )
    for answer in answers:
        (call,) = answer.choices[0].tool_calls
        assert (call.name, call.incomplete) == ("forecast", False)
        jsonschema.validate(json.loads(call.arguments_json), _WEATHER)
        assert answer.finish_reason == TOOL_CALLS


async def test_begun_reasoning_ends_in_time_and_what_follows_fits_its_schema(stub: Any) -> None:
    tool = chat_pb2.ChatTool(
        name="weather", parameters_json_schema=json.dumps(_WEATHER), strict=True
    )
    answers = await asyncio.gather(
        *(
            chat(
                stub,
                messages=[
                    message(f"What is the weather? {number}"),
                    message("<think>So", chat_pb2.CHAT_ROLE_ASSISTANT),
                ],
                continue_final_message=True,
                tools=[tool],
                parallel_tool_calls=False,
                output=processor_pb2.CHAT_OUTPUT_EVENTS,
                reasoning=_BUDGET,
                opts=options(
                    300,
                    temperature=1,
                    constraint=sampling_pb2.Constraint(json_schema=json.dumps(_WEATHER)),
                ),
            )
            for number in range(_CALLS)
        )
    )
    for answer in answers:
        choice = answer.choices[0]
        assert answer.finish_reason in (STOP, TOOL_CALLS), choice
        assert 0 < answer.usage.reasoning_tokens <= _BUDGET.max_tokens + len("</think>")
        text = "".join(event.text for event in choice.events)
        assert bool(text) is not bool(choice.tool_calls), choice
        for said in [text] if text else [call.arguments_json for call in choice.tool_calls]:
            jsonschema.validate(json.loads(said), _WEATHER)


async def test_logprobs(stub: Any) -> None:
    asked = sampling_pb2.LogprobOptions(top=2, prompt=True)
    answer = await _complete(stub, 6, logprobs=asked)
    entries = answer.choices[0].logprobs
    assert [entry.token_id for entry in entries] == answer.choices[0].token_ids
    assert all(len(entry.top) == 2 for entry in entries)
    assert all(entry.top[0].token_id == entry.token_id for entry in entries), "greedy is the top"
    assert answer.finished is not None
    prompt = answer.prompt_logprobs
    assert [entry.token_id for entry in prompt] == _PROMPT
    assert all(entry.logprob <= 0 for entry in prompt[1:])


async def test_several_choices(stub: Any) -> None:
    answer = await _complete(stub, 8, n=3, temperature=1.0)
    assert sorted(answer.choices) == [0, 1, 2]
    assert answer.usage.completion_tokens == 24
    assert len({tuple(choice.token_ids) for choice in answer.choices.values()}) > 1


async def test_a_conversation_carries_its_context(stub: Any) -> None:
    opts = options(6, temperature=0)
    conversation = Conversation(stub)
    await conversation.say(start("Hello", opts=opts))
    first = await conversation.answer()
    await conversation.say(user_turn("And then?"))
    second = await conversation.answer(2)
    await conversation.end()
    told = [
        message("Hello"),
        message(first.text, chat_pb2.CHAT_ROLE_ASSISTANT),
        message("And then?"),
    ]
    at_once = await chat(stub, messages=told, opts=opts)
    assert second.text == at_once.text
    assert second.usage.prompt_tokens == at_once.usage.prompt_tokens > first.usage.prompt_tokens


async def test_what_this_engine_lacks_is_refused_by_name(stub: Any) -> None:
    failed = await refusal(stub.Complete(completion(_PROMPT, options(4, seed=7))))
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.reason == "UNSUPPORTED_FEATURE"
    assert failed.fields == ("options.sampling.seed",)


async def test_a_token_outside_the_vocabulary_harms_nobody(stub: Any) -> None:
    """It would end SGLang's process; it gets no further than the Processor."""
    before = await _complete(stub, 8)
    failed = await refusal(stub.Complete(completion([5, 1_000_000], options(4))))
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.fields == ("token_ids.ids[1]",)
    after = await _complete(stub, 8)
    assert after.choices[0].token_ids == before.choices[0].token_ids
