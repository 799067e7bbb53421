"""From a body of the Responses API to the plain types of the pipeline. No side effects."""

from __future__ import annotations

from typing import Any

import msgspec

from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.conversation import Options
from millstream_server.processor.http.requests import (
    ANY_OBJECT,
    continues_final_message,
    options_of,
)
from millstream_server.processor.http.responses import schema
from millstream_server.processor.http.responses.tools import Tools
from millstream_server.processor.text.switches import Switches, reasoning
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError

_LOGPROBS = "message.output_text.logprobs"
_EFFORT = "reasoning.effort"


def response_options(asked: schema.Responses) -> Options:
    """Convert the options.

    Raises:
        InvalidRequestError: a part of them can't be read, or isn't supported.
    """
    if _LOGPROBS in (asked.include or ()):
        raise UnsupportedFeatureError.of("include", f"{_LOGPROBS} is not supported by this server")
    sampling: dict[str, Any] = {}
    if asked.max_output_tokens is not None:
        sampling["max_new_tokens"] = asked.max_output_tokens
    form = asked.text.format if asked.text else None
    if (constraint := _constraint(form)) is not None:
        sampling["constraint"] = constraint
    return options_of(asked, sampling)


def _constraint(form: schema.TextFormat | None) -> Constraint | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT)
    text = "" if form.schema is msgspec.UNSET else bytes(form.schema).decode()
    for name, value in (("name", form.name), ("schema", text)):
        if not value:
            raise InvalidRequestError.of(f"text.format.{name}", "is missing")
    return Constraint(ConstraintKind.JSON_SCHEMA, text)


def answers_of(asked: schema.Responses, tools: Tools) -> AnswerOptions:
    """Convert what is asked of the answer.

    If only some of the tools may be called, the model is told of these alone.

    Raises:
        InvalidRequestError: it is contradictory.
    """
    mode, only = _chosen(asked.tool_choice, tools)
    must_call = mode == "required" or bool(only)
    if must_call and not tools.told:
        raise InvalidRequestError.of("tool_choice", "asks for a call, and there are no tools")
    return AnswerOptions(
        events=None,
        with_tools=mode != "none",
        one_call=asked.parallel_tool_calls is False,
        must_call=must_call,
        only=only,
        continues=continues_final_message(asked),
        switches=_switches(asked.reasoning),
        if_known=True,
    )


def _chosen(choice: str | schema.ToolChoice | None, tools: Tools) -> tuple[str, str]:
    """Return whether a tool must be called, and which."""
    if choice is None or isinstance(choice, str):
        return choice or "auto", ""
    if choice.type in {"function", "custom"}:
        return "required", tools.named(choice, "tool_choice")
    if choice.type != "allowed_tools":
        sentence = f"{choice.type[:64]!r} is none of function, custom, allowed_tools"
        raise UnsupportedFeatureError.of("tool_choice.type", sentence)
    allowed = [
        tools.named(each, f"tool_choice.tools[{index}]")
        for index, each in enumerate(choice.tools or ())
    ]
    tools.only(allowed)
    return choice.mode or "auto", ""


def _switches(asked: schema.Reasoning | None) -> Switches:
    """Return the switches of reasoning; the response says whether the model has them.

    Agents ask for it of every model.
    """
    effort = None if asked is None else asked.effort
    if effort == "none":
        return reasoning((_EFFORT, False), ("", None))
    return reasoning(("", None), (_EFFORT, effort))
