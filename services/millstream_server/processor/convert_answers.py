"""What a client asks of a chat's answers, as plain types. No side effects."""

from __future__ import annotations

import re

from millstream.v1 import processor_pb2
from millstream_server.processor.answer_options import DEFAULT_ANSWERS, AnswerOptions
from millstream_server.processor.text.switches import Switches, reasoning
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError

_EVENTS = {
    processor_pb2.CHAT_OUTPUT_UNSPECIFIED: False,
    processor_pb2.CHAT_OUTPUT_TEXT: False,
    processor_pb2.CHAT_OUTPUT_EVENTS: True,
}
_TOOL_CHOICES = frozenset(
    (
        processor_pb2.TOOL_CHOICE_MODE_UNSPECIFIED,
        processor_pb2.TOOL_CHOICE_MODE_AUTO,
        processor_pb2.TOOL_CHOICE_MODE_NONE,
        processor_pb2.TOOL_CHOICE_MODE_REQUIRED,
        processor_pb2.TOOL_CHOICE_MODE_NAMED,
    )
)
_MUST_CALL = (
    processor_pb2.TOOL_CHOICE_MODE_REQUIRED,
    processor_pb2.TOOL_CHOICE_MODE_NAMED,
)
_MAX_REASONING_TOKENS = 2**31 - 1
"""What xgrammar can count."""
_EFFORT = re.compile(r"[A-Za-z0-9_-]{1,64}")


def answers_from_proto(start: processor_pb2.ChatStart) -> AnswerOptions:
    """Convert what a client asks of the answers.

    Raises:
        InvalidRequestError: it is contradictory, or (`UnsupportedFeatureError`) not served here.
    """
    if not (
        start.output
        or start.HasField("tool_choice")
        or start.HasField("parallel_tool_calls")
        or start.HasField("reasoning")
        or start.continue_final_message
        or (start.tools and _strict_field(start))
    ):
        return DEFAULT_ANSWERS  # as most are
    if start.output not in _EVENTS:
        raise UnsupportedFeatureError.of("start.output", "is not one that this server has")
    events = _EVENTS[start.output]
    mode = start.tool_choice.mode
    one_call = start.HasField("parallel_tool_calls") and not start.parallel_tool_calls
    if not events and (field := _needs_events(start)):
        raise InvalidRequestError.of(f"start.{field}", "needs output CHAT_OUTPUT_EVENTS")
    if _reads_reasoning(start):
        events = True
    _check_tool_choice(start)
    return AnswerOptions(
        events=events,
        with_tools=mode != processor_pb2.TOOL_CHOICE_MODE_NONE,
        one_call=one_call,
        must_call=mode in _MUST_CALL,
        only=start.tool_choice.name,
        reasoning_tokens=_reasoning_tokens(start.reasoning),
        continues=start.continue_final_message,
        switches=switches_from_proto(start.reasoning, "start.reasoning"),
    )


def _needs_events(start: processor_pb2.ChatStart) -> str:
    """Return the first field that is only for events, within `ChatStart`; empty: there is none."""
    for field in ("tool_choice", "parallel_tool_calls"):
        if start.HasField(field):
            return field
    if start.reasoning.HasField("max_tokens"):
        return "reasoning.max_tokens"
    if _continues_reasoning(start):
        return "continue_final_message"
    return _strict_field(start)


def _reads_reasoning(start: processor_pb2.ChatStart) -> bool:
    """Whether reasoning has to be told from text, whatever the model."""
    return start.reasoning.HasField("max_tokens") or _continues_reasoning(start)


def _continues_reasoning(start: processor_pb2.ChatStart) -> bool:
    last = start.messages[-1] if start.continue_final_message and start.messages else None
    return last is not None and last.reasoning != "" and not last.content


def _strict_field(start: processor_pb2.ChatStart) -> str:
    return next((f"tools[{at}].strict" for at, tool in enumerate(start.tools) if tool.strict), "")


def _check_tool_choice(start: processor_pb2.ChatStart) -> None:
    choice = start.tool_choice
    named = choice.mode == processor_pb2.TOOL_CHOICE_MODE_NAMED
    if (choice.name != "") is not named:
        sentence = "is needed with TOOL_CHOICE_MODE_NAMED, and refused without"
        raise InvalidRequestError.of("start.tool_choice.name", sentence)
    if named and choice.name not in [tool.name for tool in start.tools]:
        raise InvalidRequestError.of("start.tool_choice.name", "is none of start.tools")
    if choice.mode not in _TOOL_CHOICES:
        sentence = "is not one that this server has"
        raise UnsupportedFeatureError.of("start.tool_choice.mode", sentence)
    if choice.mode in _MUST_CALL and not start.tools:
        sentence = "asks for a call, and there is none of start.tools"
        raise InvalidRequestError.of("start.tool_choice.mode", sentence)


def _reasoning_tokens(asked: processor_pb2.ReasoningOptions) -> int | None:
    if not asked.HasField("max_tokens"):
        return None
    if asked.max_tokens > _MAX_REASONING_TOKENS:
        sentence = f"must be at most {_MAX_REASONING_TOKENS}"
        raise InvalidRequestError.of("start.reasoning.max_tokens", sentence)
    return asked.max_tokens


def switches_from_proto(asked: processor_pb2.ReasoningOptions, path: str) -> Switches:
    """Convert what the template is to be told; ``path`` is the message's.

    Raises:
        InvalidRequestError: the effort is no word.
    """
    on = asked.enabled if asked.HasField("enabled") else None
    if asked.effort and not _EFFORT.fullmatch(asked.effort):
        sentence = "must be letters, digits, _ and -, at most 64"
        raise InvalidRequestError.of(f"{path}.effort", sentence)
    return reasoning((f"{path}.enabled", on), (f"{path}.effort", asked.effort))
