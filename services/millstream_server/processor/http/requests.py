"""From a request's body to the plain types of the pipeline. No side effects."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millstream_server.generation.request import LogprobOptions
from millstream_server.generation.sampling import MAX_BIASES, Constraint, ConstraintKind
from millstream_server.media.items import Modality
from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.conversation import Options
from millstream_server.processor.http import schema
from millstream_server.processor.text.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ChatMessage,
    ChatRole,
    MediaPart,
    Tool,
    ToolCall,
)
from millstream_server.processor.text.switches import Switches, reasoning
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.priority import Priority

MAX_BIAS_BYTES = 256 << 10
"""Of logit_bias as it is written: reading 4 MiB of it takes 0.1 s."""
MAX_TOP_LOGPROBS = 20
WHOLE_INTERVAL_S = 0.25
"""How often the output of an answer that is sent whole is looked at: for stops, and to count it."""
ANY_OBJECT = '{"type": "object"}'
_DATA = re.compile(r"data:[^,;]*(?:;[^,;]*)*;base64,", re.IGNORECASE)
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "ignore_eos", "seed"),
)
"""Fields that have the same name and value here."""
_MAX_ID_DIGITS = 10
"""Of 2^32; int() refuses to read thousands."""
_CHATS = msgspec.json.Decoder(schema.Chat)
_STRING = msgspec.json.Decoder(str)
_BIASES: msgspec.json.Decoder[dict[str, float] | None] = msgspec.json.Decoder(
    dict[str, float] | None
)


def read_chat(body: bytes) -> tuple[schema.Chat, tuple[ChatMessage, ...]]:
    """Read a chat's body, and convert its messages.

    Raises:
        ServingError: it can't be read, has too much of something, or a part that isn't taken.
    """
    asked = schema.read(_CHATS, body)
    return asked, messages_of(asked)


def check_counts(
    messages: Sequence[Any], parts: Sequence[int], tools: Sequence[Any] | None
) -> None:
    """Check how many messages and tools there are, and ``parts``, of each message.

    Raises:
        InvalidRequestError: there is no message, or too many of something.
    """
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequestError.of("messages", f"1 to {MAX_MESSAGES} are needed")
    if sum(parts) > MAX_PARTS:
        why = f"at most {MAX_PARTS} content parts and tool calls in all"
        raise InvalidRequestError.of("messages", why)
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequestError.of("tools", f"at most {MAX_TOOLS} tools, not {len(tools)}")


def _parts(message: schema.Message) -> int:
    content = message.content
    return (len(content) if isinstance(content, list) else 0) + len(message.tool_calls or ())


def options_of(asked: schema.Generation, sampling: Mapping[str, Any], **more: Any) -> Options:
    """Convert what chats and completions have in common.

    Raises:
        InvalidRequestError: a part of it can't be read.
    """
    same = {name: v for name in _SAMPLING if (v := getattr(asked, name)) is not None}
    if asked.seed is not None:
        same["seed_best_effort"] = True
    if asked.min_tokens is not None:
        same["min_new_tokens"] = asked.min_tokens
    if asked.stop_token_ids:
        same["stop_token_ids"] = tuple(asked.stop_token_ids)
    if asked.logit_bias is not schema.NULL:
        same["logit_bias"] = _bias(asked.logit_bias)
    stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    return Options(
        path="",
        sampling={**same, **sampling},
        priority=Priority[(asked.priority or "normal").upper()],
        n=1 if asked.n is None else asked.n,
        stops=stops,
        min_interval_s=0.0 if asked.stream else WHOLE_INTERVAL_S,
        include_special_tokens=asked.skip_special_tokens is False,
        session=asked.prompt_cache_key or "",
        cache_salt=asked.cache_salt or "",
        **more,
    )


def _bias(given: msgspec.Raw) -> dict[int, float]:
    if len(memoryview(given)) > MAX_BIAS_BYTES:
        raise InvalidRequestError.of("logit_bias", f"at most {MAX_BIAS_BYTES} bytes")
    try:
        found = _BIASES.decode(given) or {}
    except schema.BROKEN:
        raise InvalidRequestError.of("logit_bias", "must have numbers by token id") from None
    if len(found) > MAX_BIASES:
        raise InvalidRequestError.of("logit_bias", f"at most {MAX_BIASES} tokens")
    for token in found:
        if not (token.isascii() and token.isdigit() and len(token) <= _MAX_ID_DIGITS):
            raise InvalidRequestError.of("logit_bias", f"{token[:32]!r} is no token id")
    return {int(token): value for token, value in found.items()}


def chat_options(asked: schema.Chat) -> Options:
    """Convert a chat's options.

    Raises:
        InvalidRequestError: a part of it can't be read.
    """
    sampling: dict[str, Any] = {}
    most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    if most is not None:
        sampling["max_new_tokens"] = most
    if (constraint := _constraint(asked.response_format)) is not None:
        sampling["constraint"] = constraint
    return options_of(asked, sampling, logprobs=_logprobs(asked.logprobs, asked.top_logprobs))


def _logprobs(wanted: bool | None, top: int | None) -> LogprobOptions | None:  # noqa: FBT001
    if not wanted:
        if top:
            raise InvalidRequestError.of("top_logprobs", "needs logprobs")
        return None
    return LogprobOptions(top=checked_top(top or 0, "top_logprobs"))


def checked_top(top: int, field: str) -> int:
    """Check how many alternatives are asked for.

    Raises:
        InvalidRequestError: too many, or fewer than none.
    """
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError.of(field, f"must be from 0 to {MAX_TOP_LOGPROBS}, not {top}")
    return top


def _constraint(form: schema.ResponseFormat | None) -> Constraint | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT)
    if form.json_schema is None or not bytes(form.json_schema.schema):
        raise InvalidRequestError.of("response_format.json_schema.schema", "is missing")
    return Constraint(ConstraintKind.JSON_SCHEMA, bytes(form.json_schema.schema).decode())


# ---- tools and reasoning -------------------------------------------------------------------------


def tools_of(asked: schema.Chat) -> list[Tool]:
    """Convert the tools; the schemas stay as they were written."""
    return [
        Tool(
            tool.function.name,
            tool.function.description or "",
            schema_text(bytes(tool.function.parameters)),
            bool(tool.function.strict),
        )
        for tool in asked.tools or ()
    ]


def schema_text(raw: bytes) -> str:
    """Return a tool's JSON Schema as text; null is none."""
    return "" if raw == b"null" else raw.decode()


def json_text(raw: msgspec.Raw) -> str:
    """Return the arguments of an earlier call as text: what a string has, and other JSON itself."""
    text = bytes(raw)
    return _STRING.decode(text) if text[:1] == b'"' else text.decode()


def answers_of(asked: schema.Chat) -> AnswerOptions:
    """Convert what a chat asks of its answer.

    Raises:
        InvalidRequestError: it is contradictory.
    """
    choice, only = asked.tool_choice, ""
    if isinstance(choice, schema.NamedTool):
        only = choice.function.name
        if only not in [tool.function.name for tool in asked.tools or ()]:
            raise InvalidRequestError.of("tool_choice.function.name", "is none of tools")
    must_call = choice == "required" or bool(only)
    if must_call and not asked.tools:
        raise InvalidRequestError.of("tool_choice", "asks for a call, and there are no tools")
    return AnswerOptions(
        events=None,
        with_tools=choice != "none",
        one_call=asked.parallel_tool_calls is False,
        must_call=must_call,
        only=only,
        continues=continues_final_message(asked),
        switches=_switches(asked),
    )


def continues_final_message(asked: Any) -> bool:
    """Whether a body asks that the answer goes on in the last message, by vLLM's two fields.

    Raises:
        InvalidRequestError: they contradict each other.
    """
    continues = bool(asked.continue_final_message)
    if asked.add_generation_prompt is continues:
        why = "must be false with continue_final_message, else true, or left out"
        raise InvalidRequestError.of("add_generation_prompt", why)
    return continues


def _switches(asked: schema.Chat) -> Switches:
    given, at = asked.chat_template_kwargs or schema.TemplateOptions(), "chat_template_kwargs"
    named = "thinking" if given.enable_thinking is None else "enable_thinking"
    enabled = (f"{at}.{named}", getattr(given, named))
    if given.reasoning_effort is not None:
        return reasoning(enabled, (f"{at}.reasoning_effort", given.reasoning_effort))
    if asked.reasoning_effort == "none":
        return reasoning(("reasoning_effort", False), ("", None))
    return reasoning(enabled, ("reasoning_effort", asked.reasoning_effort))


# ---- messages ------------------------------------------------------------------------------------


def messages_of(asked: schema.Chat) -> tuple[ChatMessage, ...]:
    """Convert the messages, if there aren't too many (`check_counts`).

    Raises:
        ServingError: a part of one can't be taken.
    """
    check_counts(asked.messages, [_parts(message) for message in asked.messages], asked.tools)
    return tuple(
        _message(message, f"messages[{index}]") for index, message in enumerate(asked.messages)
    )


def _message(message: schema.Message, path: str) -> ChatMessage:
    content = message.content
    parts: tuple[str | MediaPart, ...] = ()
    if isinstance(content, list):
        parts = tuple(_part(part, f"{path}.content[{index}]") for index, part in enumerate(content))
        content = "".join(part for part in parts if isinstance(part, str))
        if all(isinstance(part, str) for part in parts):
            parts = ()
    calls = message.tool_calls or ()
    return ChatMessage(
        ChatRole(message.role),
        content or "",
        tuple(ToolCall(c.id, c.function.name, json_text(c.function.arguments)) for c in calls),
        message.tool_call_id or "",
        message.name or "",
        path,
        parts,
        message.reasoning_content or message.reasoning or "",
    )


def _part(part: schema.Part, path: str) -> str | MediaPart:
    if isinstance(part, schema.TextPart):
        return part.text
    if isinstance(part, schema.RefusalPart):
        return part.refusal
    if isinstance(part, schema.ImagePart):
        return media_at(Modality.IMAGE, part.image_url.url, f"{path}.image_url.url")
    if isinstance(part, schema.VideoPart):
        return media_at(Modality.VIDEO, part.video_url.url, f"{path}.video_url.url")
    raise UnsupportedFeatureError.of(path, "this server takes text, images and videos only")


def media_at(modality: Modality, url: str, path: str) -> MediaPart:
    """Return a file of a data URL, or of another URL.

    Raises:
        InvalidRequestError: a data URL can't be read.
    """
    head = _DATA.match(url[:256])
    if head is None:
        if url[:5].lower() == "data:":
            raise InvalidRequestError.of(path, "a data URL needs ;base64")
        return MediaPart(modality, path, url=url)
    return media_in_base64(modality, url[head.end() :], path)


def media_in_base64(modality: Modality, encoded: str, path: str) -> MediaPart:
    """Decode a file.

    Raises:
        InvalidRequestError: it isn't base64.
    """
    try:
        return MediaPart(modality, path, data=base64.b64decode(encoded, validate=True))
    except (binascii.Error, ValueError):
        raise InvalidRequestError.of(path, "isn't base64") from None
