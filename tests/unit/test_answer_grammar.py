"""What a client asks of an answer becomes one grammar, or is refused by its field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from millstream.v1 import chat_pb2, processor_pb2, sampling_pb2
from millstream_server.formats.choosing import AnswerFormat
from millstream_server.formats.families import FORMATS
from millstream_server.generation.sampling import Ability, Constraint
from millstream_server.processor.answer import reading_of
from millstream_server.processor.answer_grammar import binding_of, with_grammar
from millstream_server.processor.conversation import Conversation
from millstream_server.processor.convert import begin, take_request
from millstream_server.processor.media.uploads import MediaBudget, Uploads
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.text.messages import ChatMessage, ChatRole
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool
from tests.support.processor.chats import message, options, start, tool_results
from tests.support.walks import Tag

EVENTS = processor_pb2.CHAT_OUTPUT_EVENTS
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
STRICT = chat_pb2.ChatTool(name="f", parameters_json_schema=json.dumps(CITY), strict=True)
FREE = chat_pb2.ChatTool(name="f", parameters_json_schema=json.dumps(CITY))
ODD = chat_pb2.ChatTool(
    name="f", parameters_json_schema='{"properties": {"n": {"multipleOf": 2}}}', strict=True
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>'
WRONG = CALL.replace("Oslo", "Bonn")
ANSWER = '{"city": "Rome"}'
REQUIRED = processor_pb2.ToolChoice(mode=processor_pb2.TOOL_CHOICE_MODE_REQUIRED)
BY_SCHEMA = options(constraint=sampling_pb2.Constraint(json_schema=json.dumps(CITY)))
TAG = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "a"}})
BY_TAG = options(constraint=sampling_pb2.Constraint(structural_tag=TAG))
THINKING = "<think>\n"
POOL = WorkPool(PoolLimits())


def _budget(tokens: int) -> processor_pb2.ReasoningOptions:
    return processor_pb2.ReasoningOptions(max_tokens=tokens)


async def _constraint(
    prompt: str = THINKING,
    *,
    results: bool = False,
    form: str = "hermes",
    abilities: Sequence[Ability] = tuple(Ability),
    **fields: Any,
) -> Constraint | None:
    """Return the constraint of an answer to a start or, behind it, to a tool's result."""
    conversation = Conversation(lambda: Uploads(MediaBudget(0), 0), OpenWork())
    await begin(conversation, start("hi", output=EVENTS, **fields).start, POOL)
    said = await conversation.next_turn()
    if results:
        conversation.ended(ChatMessage(ChatRole.ASSISTANT, ""), ())
        await take_request(conversation, tool_results(message("!", chat_pb2.CHAT_ROLE_TOOL)), POOL)
        said = await conversation.next_turn()
    how = AnswerFormat(form=FORMATS[form], reason="", hidden={})
    reading = reading_of(how, conversation.told_tools, prompt, one_call=False)
    given: Any = said
    binding = binding_of(reading, conversation, given, conversation.options)
    prompts = Prompts(PoolLimits())
    try:
        made = await with_grammar(conversation.options, binding, abilities, prompts)
    finally:
        prompts.close()
    constraint: Constraint | None = made.sampling.get("constraint")
    return constraint


async def _tag(prompt: str = THINKING, **fields: Any) -> Tag:
    constraint = await _constraint(prompt, **fields)
    assert constraint is not None
    return Tag(constraint.source)


async def test_without_anything_to_keep_there_is_no_grammar() -> None:
    assert await _constraint() is await _constraint(tools=[FREE]) is None
    assert await _constraint(tools=[FREE], tool_choice=REQUIRED, results=True) is None


@pytest.mark.parametrize("results", [False, True])
async def test_a_strict_tools_arguments_fit_in_every_turn(*, results: bool) -> None:
    tag = await _tag(tools=[STRICT], results=results)
    for text in (f"hm</think>\n\nLet me see.{CALL}", "</think>Hello.", f"</think>{CALL}{CALL}"):
        assert tag.admits(text), text
    assert not tag.admits(f"</think>{WRONG}")


async def test_after_a_required_call_an_answer_to_its_result_may_be_text_by_the_schema() -> None:
    asked: dict[str, Any] = {"tools": [FREE], "tool_choice": REQUIRED, "opts": BY_SCHEMA}
    first = await _tag(**asked)
    assert first.admits(f"</think>{CALL}")
    assert not first.admits(f"</think>{ANSWER}")
    second = await _tag(**asked, results=True)
    assert second.admits(f"</think>{ANSWER}")
    assert second.admits(f"</think>{CALL}")
    assert not second.admits("</think>Hello.")


async def test_a_schema_holds_for_the_text_behind_reasoning() -> None:
    tag = await _tag(opts=BY_SCHEMA)
    assert tag.admits(f"hm</think>\n\n{ANSWER}")
    assert not tag.admits(ANSWER)
    assert not tag.admits(f"hm</think>{CALL}")
    regex = options(constraint=sampling_pb2.Constraint(regex="yes|no"))
    assert (await _tag(opts=regex)).admits("hm</think>yes")
    grammar = options(constraint=sampling_pb2.Constraint(ebnf='root ::= "a" | "b"'))
    assert (await _tag(opts=grammar)).admits("hm</think>b")


async def test_reasoning_has_a_budget_also_where_calls_are_required() -> None:
    tag = await _tag(reasoning=_budget(2), tools=[FREE], tool_choice=REQUIRED)
    assert tag.draws(f"hm</think>{CALL}")
    assert not tag.draws(f"hmm</think>{CALL}")
    free = await _tag(reasoning=_budget(2))
    assert free.draws("hm</think>Anything.")
    assert not free.draws("hmm</think>Anything.")


async def test_a_clients_own_tag_stays_as_it_is() -> None:
    constraint = await _constraint(opts=BY_TAG, tools=[FREE])
    assert constraint is not None
    assert constraint.source == TAG


INVALID, UNSUPPORTED = "INVALID_REQUEST", "UNSUPPORTED_FEATURE"
MODE, FIRST, BUDGET = (
    "start.tool_choice.mode",
    "start.tools[0].strict",
    "start.reasoning.max_tokens",
)
SCHEMA = "start.options.sampling.constraint"
WITHOUT_TAGS = {"abilities": [Ability.CONSTRAINTS]}


@pytest.mark.parametrize(
    ("fields", "field", "reason", "says"),
    [
        ({"tools": [FREE], "tool_choice": REQUIRED, "opts": BY_TAG}, MODE, INVALID, "exclude each"),
        ({"tools": [STRICT], "opts": BY_TAG}, FIRST, INVALID, "exclude each other"),
        ({"reasoning": _budget(1), "opts": BY_TAG}, BUDGET, INVALID, "exclude each other"),
        ({"tools": [STRICT], **WITHOUT_TAGS}, FIRST, UNSUPPORTED, "take no structural tags"),
        ({"reasoning": _budget(1), **WITHOUT_TAGS}, BUDGET, UNSUPPORTED, "take no structural tags"),
        ({"opts": BY_SCHEMA, **WITHOUT_TAGS}, SCHEMA, UNSUPPORTED, "take no structural tags"),
        ({"tools": [ODD]}, FIRST, UNSUPPORTED, "no grammar keeps 'multipleOf'"),
        ({"tools": [STRICT], "form": "think"}, FIRST, UNSUPPORTED, "has no grammar of calls"),
        (
            {"tools": [FREE], "opts": BY_SCHEMA, "form": "think"},
            SCHEMA,
            UNSUPPORTED,
            "has no grammar of calls",
        ),
        ({"reasoning": _budget(1), "form": "llama-json"}, BUDGET, UNSUPPORTED, "has no reasoning"),
        (
            {"opts": options(constraint=sampling_pb2.Constraint(json_schema="[]"))},
            SCHEMA,
            INVALID,
            "must be a JSON object",
        ),
    ],
)
async def test_what_can_not_be_kept_is_refused_by_its_field(
    fields: dict[str, Any], field: str, reason: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        await _constraint(**fields)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.reason == reason
