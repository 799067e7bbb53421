"""Chat with events: reasoning, text and tool calls in order, and what becomes of them next turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import grpc
import pytest

from millstream.v1 import chat_pb2, generation_pb2, processor_pb2, sampling_pb2
from millstream_server.generation.sampling import Ability, Constraint, ConstraintKind
from millstream_server.processor.text.tokenizer import TextModel
from tests.support.processor.chats import (
    Answer,
    Conversation,
    chat,
    message,
    options,
    start,
    tool_results,
    user_turn,
)
from tests.support.processor.reading import CALL, SPOKEN, reading_model, serving
from tests.support.processor.saying import saying
from tests.support.wire.failures import refusal

EVENTS = processor_pb2.CHAT_OUTPUT_EVENTS
CALLS = generation_pb2.FINISH_REASON_TOOL_CALLS
TOOLS = [
    chat_pb2.ChatTool(name="f", parameters_json_schema='{"properties": {"s": {"type": "string"}}}'),
    chat_pb2.ChatTool(name="g"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return reading_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def self_describing_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    thinking = {"open": "<think>", "close": "</think>"}
    template = {"start_anchor": "<a>", "fields": {"thinking": thinking, "content": {}}}
    folder = tmp_path_factory.mktemp("self_describing")
    return reading_model(folder, chat_template=None, response_template=template)


def pieces(answer: Answer) -> list[tuple[str, ...]]:
    """Join a choice's events; calls as (id, name, arguments)."""
    found: list[tuple[str, ...]] = []
    for event in answer.choices[0].events:
        kind = event.WhichOneof("event")
        if kind in ("text", "reasoning"):
            text = getattr(event, kind)
            joins = found and found[-1][0] == kind
            found[-1:] = [(kind, found[-1][1] + text)] if joins else [*found[-1:], (kind, text)]
        elif kind == "tool_call_start":
            call = event.tool_call_start
            found.append((call.id, call.name, ""))
        elif kind == "tool_call_arguments_json":
            found[-1] = (*found[-1][:2], found[-1][2] + event.tool_call_arguments_json)
        elif event.tool_call_end.incomplete:
            found[-1] += ("incomplete",)
    return found


async def test_an_answer_comes_as_events_in_order_and_its_calls_whole(model: TextModel) -> None:
    async with serving(model) as front:
        with saying(model, SPOKEN):
            answer = await chat(front.stub, "hi", tools=TOOLS, output=EVENTS)
    choice = answer.choices[0]
    first, second = choice.tool_calls
    assert pieces(answer) == [
        ("reasoning", "hm"),
        ("text", "Let me see."),
        (first.id, "f", '{"s": "Oslo"}'),
        (second.id, "g", "{}"),
    ]
    assert [(c.name, c.arguments_json, c.incomplete) for c in choice.tool_calls] == [
        ("f", '{"s": "Oslo"}', False),
        ("g", "{}", False),
    ]
    assert (answer.text, answer.finish_reason, choice.matched_stop) == ("", CALLS, None)
    reasoning = len("<think>hm</think>")
    assert answer.usage.reasoning_tokens == reasoning
    assert answer.usage.completion_tokens == len(SPOKEN) + 1
    assert choice.token_count == answer.usage.completion_tokens


async def test_unset_the_same_answer_is_one_text(model: TextModel) -> None:
    async with serving(model) as front:
        with saying(model, SPOKEN):
            answer = await chat(front.stub, "hi", tools=TOOLS)
    assert answer.text == SPOKEN
    assert answer.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert not answer.choices[0].events
    assert answer.usage.reasoning_tokens == 0


async def test_a_call_that_was_cut_is_incomplete_and_length_stays_the_reason(
    model: TextModel,
) -> None:
    cut = SPOKEN.index("slo") + 1
    async with serving(model) as front:
        with saying(model, SPOKEN):
            answer = await chat(front.stub, "hi", tools=TOOLS, output=EVENTS, opts=options(cut))
    (call,) = answer.choices[0].tool_calls
    assert (call.arguments_json, call.incomplete) == ('{"s": "Os', True)
    assert pieces(answer)[-1] == (call.id, "f", '{"s": "Os', "incomplete")
    assert answer.finish_reason == generation_pb2.FINISH_REASON_LENGTH


async def test_without_parallel_calls_an_answer_ends_behind_its_first(model: TextModel) -> None:
    async with serving(model) as front:
        with saying(model, SPOKEN):
            answer = await chat(
                front.stub, "hi", tools=TOOLS, output=EVENTS, parallel_tool_calls=False
            )
    assert [call.name for call in answer.choices[0].tool_calls] == ["f"]
    assert answer.finish_reason == CALLS
    assert answer.usage.completion_tokens == SPOKEN.index('"}}') + len('"}}')


async def test_calls_and_reasoning_go_into_the_conversation_as_the_template_has_them(
    model: TextModel,
) -> None:
    async with serving(model) as front:
        with saying(model, SPOKEN, "Cold.") as prompts:
            conversation = Conversation(front.stub)
            await conversation.say(start("hi", tools=TOOLS, output=EVENTS))
            first = await conversation.answer(1)
            f, g = [call.id for call in first.choices[0].tool_calls]
            await conversation.say(tool_results(_result(f, "-3"), _result(g, "!")))
            second = await conversation.answer(2)
            assert pieces(second) == [("reasoning", "Cold.")]  # the prompt ends with <think>
            await conversation.say(tool_results(_result("other", "?")))
            failed = await refusal(conversation.call)
    spoken = f'(hm)Let me see.[{f} f {{"s": "Oslo"}}][{g} g {{}}]'
    assert prompts[0] == "f;g;user:hi|<think>"
    assert prompts[1] == f"f;g;user:hi|assistant:{spoken}|tool:-3|tool:!|<think>"
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.fields == ("tool_results.messages[0].tool_call_id",)


def _result(call_id: str, text: str) -> chat_pb2.ChatMessage:
    return message(text, chat_pb2.CHAT_ROLE_TOOL, tool_call_id=call_id)


async def test_the_client_may_switch_tools_and_reasoning_off(model: TextModel) -> None:
    none = processor_pb2.ToolChoice(mode=processor_pb2.TOOL_CHOICE_MODE_NONE)
    off = processor_pb2.ReasoningOptions(enabled=False)
    said = chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_ASSISTANT, reasoning="so")
    messages = [message("hi"), said, message("go")]
    async with serving(model) as front:
        with saying(model, "x") as prompts:
            await chat(
                front.stub, messages=messages, tools=TOOLS, output=EVENTS, tool_choice=none,
                reasoning=off,
            )  # fmt: skip
    assert prompts == ["user:hi|assistant:(so)|user:go|no <think>"]


async def test_a_continued_message_and_its_answer_are_one_in_the_conversation(
    model: TextModel,
) -> None:
    said = message("Let me s", chat_pb2.CHAT_ROLE_ASSISTANT, reasoning="hm")
    async with serving(model) as front:
        with saying(model, f"ee.\n{CALL}", "Cold.") as prompts:
            conversation = Conversation(front.stub)
            await conversation.say(
                start(
                    messages=[message("hi"), said],
                    tools=TOOLS,
                    output=EVENTS,
                    continue_final_message=True,
                )
            )
            answer = await conversation.answer(1)
            (call,) = answer.choices[0].tool_calls
            await conversation.say(tool_results(_result(call.id, "-3")))
            await conversation.answer(2)
            await conversation.end()
    assert pieces(answer) == [("text", "ee."), (call.id, "f", '{"s": "Oslo"}')]
    assert answer.usage.reasoning_tokens == 0
    assert prompts[0] == "f;g;user:hi|assistant:(hm)Let me s"
    spoken = f'(hm)Let me see.[{call.id} f {{"s": "Oslo"}}]'
    assert prompts[1] == f"f;g;user:hi|assistant:{spoken}|tool:-3|<think>"


async def test_a_conversation_that_ends_with_the_model_gets_a_further_answer(
    model: TextModel,
) -> None:
    said = message("Let me s", chat_pb2.CHAT_ROLE_ASSISTANT)
    tokenized = processor_pb2.TokenizeRequest(
        conversation=processor_pb2.Conversation(messages=[message("hi"), said])
    )
    async with serving(model) as front:
        with saying(model, "hm</think>So.", "Bye.") as prompts:
            conversation = Conversation(front.stub)
            await conversation.say(start(messages=[message("hi"), said], output=EVENTS))
            answer = await conversation.answer(1)
            await conversation.say(user_turn("bye"))
            await conversation.answer(2)
            await conversation.end()
        counted = await front.stub.Tokenize(tokenized)
    assert pieces(answer) == [("reasoning", "hm"), ("text", "So.")]
    first = "user:hi|assistant:Let me s|"
    assert prompts == [f"{first}<think>", f"{first}assistant:(hm)So.|user:bye|<think>"]
    assert len(counted.token_ids) == len(prompts[0])


async def test_reasoning_and_plain_text_are_continued_too(model: TextModel) -> None:
    reasoned = chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_ASSISTANT, reasoning="h")
    texts = [message("hi"), message("Let me s", chat_pb2.CHAT_ROLE_ASSISTANT)]
    async with serving(model) as front:
        with saying(model, "m</think>Hi", "ee.", "Bye.") as prompts:
            answer = await chat(
                front.stub,
                messages=[message("hi"), reasoned],
                output=EVENTS,
                continue_final_message=True,
            )
            conversation = Conversation(front.stub)
            await conversation.say(start(messages=texts, continue_final_message=True))
            plain = await conversation.answer(1)
            await conversation.say(user_turn("bye"))
            await conversation.answer(2)
            await conversation.end()
    assert pieces(answer) == [("reasoning", "m"), ("text", "Hi")]
    assert plain.text == "ee."
    assert prompts == [
        "user:hi|assistant:(h",
        "user:hi|assistant:Let me s",
        "user:hi|assistant:Let me see.|user:bye|<think>",
    ]


async def test_a_strict_tools_grammar_reaches_the_workers_in_every_turn(model: TextModel) -> None:
    constraints: list[Constraint | None] = []
    able = mock.patch("millstream_server.engines.simulated.engine._ABILITIES", frozenset(Ability))
    with able:
        async with serving(model) as front:
            with saying(model, SPOKEN, "Cold.", constraints=constraints):
                conversation = Conversation(front.stub)
                await conversation.say(start("hi", tools=[TOOLS[0], STRICT], output=EVENTS))
                first = await conversation.answer(1)
                results = [_result(call.id, "!") for call in first.choices[0].tool_calls]
                await conversation.say(tool_results(*results))
                await conversation.answer(2)
                await conversation.end()
    one, two = constraints
    assert one is not None
    assert one.kind is ConstraintKind.STRUCTURAL_TAG
    assert one == two


def _choice(mode: str, name: str = "") -> dict[str, Any]:
    value = processor_pb2.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{mode}")
    choice = processor_pb2.ToolChoice(mode=value, name=name)
    return {"tool_choice": choice, "output": EVENTS, "tools": TOOLS}


INVALID, UNSUPPORTED = "INVALID_REQUEST", "UNSUPPORTED_FEATURE"
STRICT = chat_pb2.ChatTool(name="g", strict=True)
SCHEMA = "start.tools[0].parameters_json_schema"
BUDGET = processor_pb2.ReasoningOptions(max_tokens=9)
REASONED = chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_ASSISTANT, reasoning="hm")


def _with(schema: str) -> chat_pb2.ChatTool:
    return chat_pb2.ChatTool(name="f", parameters_json_schema=schema)


REFUSED: Sequence[tuple[dict[str, Any], str, str]] = [
    ({"output": 9}, "start.output", UNSUPPORTED),
    (_choice("REQUIRED"), "start.tool_choice.mode", UNSUPPORTED),
    (_choice("NAMED", "f"), "start.tool_choice.mode", UNSUPPORTED),
    (_choice("NAMED", "other"), "start.tool_choice.name", INVALID),
    (_choice("NAMED"), "start.tool_choice.name", INVALID),
    (_choice("AUTO", "f"), "start.tool_choice.name", INVALID),
    (_choice("AUTO") | {"output": 0}, "start.tool_choice", INVALID),
    ({"parallel_tool_calls": True}, "start.parallel_tool_calls", INVALID),
    (
        {"reasoning": processor_pb2.ReasoningOptions(effort="high")},
        "start.reasoning.effort",
        UNSUPPORTED,
    ),
    (
        {"reasoning": processor_pb2.ReasoningOptions(effort="a b")},
        "start.reasoning.effort",
        INVALID,
    ),
    (
        {"messages": [message("hi", reasoning="so")]},
        "start.messages[0].reasoning",
        INVALID,
    ),
    ({"tools": [TOOLS[0], TOOLS[0]], "output": EVENTS}, "start.tools[1].name", INVALID),
    ({"tools": [TOOLS[0], STRICT]}, "start.tools[1].strict", INVALID),
    ({"tools": [TOOLS[0], STRICT], "output": EVENTS}, "start.tools[1].strict", UNSUPPORTED),
    ({"tools": [_with("{")], "output": EVENTS}, SCHEMA, INVALID),
    ({"tools": [_with('{"a": ' * 40 + "{}" + "}" * 40)], "output": EVENTS}, SCHEMA, INVALID),
    ({"tools": [_with(f'{{"a": "{"b" * 70_000}"}}')], "output": EVENTS}, SCHEMA, INVALID),
    (
        {"tools": [_with(f'{{"a": [{"{}," * 5000}{{}}]}}')], "output": EVENTS},
        "start.tools",
        INVALID,
    ),
    ({"reasoning": BUDGET}, "start.reasoning.max_tokens", INVALID),
    ({"reasoning": BUDGET, "output": EVENTS}, "start.reasoning.max_tokens", UNSUPPORTED),
    (
        {
            "reasoning": processor_pb2.ReasoningOptions(max_tokens=2**31),
            "output": EVENTS,
        },
        "start.reasoning.max_tokens",
        INVALID,
    ),
    (
        {
            "opts": options(constraint=sampling_pb2.Constraint(json_schema="{}")),
            "output": EVENTS,
        },
        "start.options.sampling.constraint",
        UNSUPPORTED,
    ),
    ({"continue_final_message": True}, "start.continue_final_message", INVALID),
    ({"continue_final_message": True, "messages": []}, "start.messages", INVALID),
    (
        {"messages": [message("hi"), REASONED], "continue_final_message": True},
        "start.continue_final_message",
        INVALID,
    ),
    (
        {
            "messages": [message("hi"), message(CALL * 1000, chat_pb2.CHAT_ROLE_ASSISTANT)],
            "continue_final_message": True,
            "output": EVENTS,
        },
        "start.messages",  # its length comes first
        INVALID,
    ),
]


async def test_what_can_not_be_done_is_refused_by_field(model: TextModel) -> None:
    async with serving(model) as front:
        for fields, field, reason in REFUSED:
            conversation = Conversation(front.stub)
            await conversation.say(start("hi", **fields))
            failed = await refusal(conversation.call)
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, fields
            assert (failed.fields, failed.reason) == ((field,), reason)


async def test_the_format_and_why_are_listed_and_none_is_refused(
    model: TextModel, self_describing_model: TextModel, text_model: TextModel
) -> None:
    described = ("response_template", "its checkpoint has a response_template")
    for served, form, listed in (
        (self_describing_model, "", described),
        (text_model, "kimi-k2", ("kimi-k2", "set by --formats")),
        (model, "", ("think", "its chat template or vocabulary has the markers")),
        (text_model, "", ("", "")),
    ):
        async with serving(served, form) as front:
            (found,) = (await front.stub.ListModels(processor_pb2.ListModelsRequest())).models
            assert (found.answer_format.name, found.answer_format.reason) == listed
            if listed[0]:
                continue
            conversation = Conversation(front.stub)
            await conversation.say(start("hi", output=EVENTS))
            failed = await refusal(conversation.call)
            assert (failed.fields, failed.reason) == (("start.output",), UNSUPPORTED)
