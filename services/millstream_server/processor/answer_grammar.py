"""The grammar of an answer that has to keep something: calls, schemas, a bound on its reasoning.

All of it is one structural tag, from the answer's first token.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import replace
from functools import lru_cache

from millstream_server.formats.format import Format
from millstream_server.formats.tag_parts import ANSWER_SPACE, Part, ebnf, json_value, regex
from millstream_server.formats.tags import (
    Thinking,
    UnconstrainableError,
    Wanted,
    structural_tag,
)
from millstream_server.formats.tags import Tool as TaggedTool
from millstream_server.generation.sampling import Ability, Constraint, ConstraintKind
from millstream_server.generation.validation import check_constraint
from millstream_server.processor.answer import Reading
from millstream_server.processor.conversation import Conversation, Options, UserTurn
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.text.messages import Tool
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.frozen import dataclass
from millstream_server.runtime.work.pool import stop_if_gone

_SECONDS_PER_TOOL = 0.004
"""About what a tool's grammar takes to make."""
_SECONDS_PER_CHAR = 5e-6
"""More, of a schema that is all patterns."""
_KEPT_TAGS = 32
"""Of up to 256 KiB: a conversation has the same tools in every turn."""
_BUDGET = "start.reasoning.max_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What an answer has to keep."""

    form: Format
    begins: Thinking
    tools: tuple[Tool, ...]
    must_call: bool
    only: str
    one_call: bool
    reasoning_tokens: int | None
    text: Constraint | None
    """What the answer's text has to match."""
    text_field: str

    @property
    def field(self) -> str:
        """The path of the first field that needs a grammar; empty: none does."""
        if self.must_call:
            return "start.tool_choice.mode"
        for index, tool in enumerate(self.tools):
            if tool.strict:
                return f"start.tools[{index}].strict"
        if self.reasoning_tokens is not None:
            return _BUDGET
        return self.text_field if self.text else ""


def binding_of(
    reading: Reading, conversation: Conversation, said: UserTurn, options: Options
) -> Binding:
    """Return what the answer to a turn has to keep; one to tools' results needn't call."""
    answers, given = conversation.answers, options.sampling.get("constraint")
    must_call = answers.must_call and not said.has_results
    is_tag = given is not None and given.kind is ConstraintKind.STRUCTURAL_TAG
    return Binding(
        form=reading.how.form,
        begins=reading.begins,
        tools=tuple(conversation.told_tools),
        must_call=must_call,
        only=answers.only if must_call else "",
        one_call=answers.one_call,
        reasoning_tokens=answers.reasoning_tokens,
        text=None if is_tag else given,
        text_field=f"{options.path}sampling.constraint",
    )


async def with_grammar(
    options: Options, binding: Binding, abilities: Container[Ability], prompts: Prompts
) -> Options:
    """Return the options of an answer that keeps to a binding.

    Raises:
        ServingError: the model's format, its workers or the client's options don't allow it.
    """
    field, given = binding.field, options.sampling.get("constraint")
    if not field:
        return options
    if Ability.STRUCTURAL_TAGS not in abilities:
        sentence = "needs a grammar of the answer, and this model's workers take no structural tags"
        raise UnsupportedFeatureError.of(field, sentence)
    if given is not None and binding.text is None:
        sentence = f"and {binding.text_field}.structural_tag exclude each other"
        raise InvalidRequestError.of(field, sentence)
    if given is not None and (violations := check_constraint(given, options.path)):
        raise InvalidRequestError.of_all(violations)
    chars = sum(len(tool.parameters_json_schema) for tool in binding.tools)
    seconds = (len(binding.tools) + 1) * _SECONDS_PER_TOOL + chars * _SECONDS_PER_CHAR
    tag = await prompts.threads.run(lambda: _tag(binding), seconds)
    sampling = {**options.sampling, "constraint": tag}
    await prompts.read_grammar(sampling)
    return replace(options, sampling=sampling)


@lru_cache(maxsize=_KEPT_TAGS)
def _tag(binding: Binding) -> Constraint:
    if binding.reasoning_tokens is not None and not binding.form.reasoning:
        sentence = f"the model's format, {binding.form.name}, has no reasoning"
        raise UnsupportedFeatureError.of(_BUDGET, sentence)
    wanted = Wanted(
        tools=tuple(
            TaggedTool(tool.name, json.loads(tool.parameters_json_schema or "{}"), tool.strict)
            for tool in binding.tools
        ),
        must_call=binding.must_call,
        only=binding.only,
        parallel=not binding.one_call,
        thinking=binding.begins,
        answer=_part(binding.text) if binding.text else None,
        reasoning_tokens=binding.reasoning_tokens,
    )
    try:
        tag = structural_tag(binding.form, wanted, stop_if_gone)
    except UnconstrainableError as error:
        raise UnsupportedFeatureError.of(_field_of(error, binding), str(error)) from error
    return Constraint(ConstraintKind.STRUCTURAL_TAG, tag or "")


def _field_of(error: UnconstrainableError, binding: Binding) -> str:
    for index, tool in enumerate(binding.tools):
        if tool.name == error.tool:
            return f"start.tools[{index}].{'strict' if tool.strict else 'name'}"
    return binding.field


def _part(constraint: Constraint) -> Part:
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return json_value(json.loads(constraint.source), ANSWER_SPACE)
    return (regex if constraint.kind is ConstraintKind.REGEX else ebnf)(constraint.source)
