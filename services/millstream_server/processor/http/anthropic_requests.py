"""From a Messages body to the plain types of the pipeline. No side effects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.media.items import Modality
from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.conversation import Options
from millstream_server.processor.http import anthropic_schema as schema
from millstream_server.processor.http.requests import (
    WHOLE_INTERVAL_S,
    check_counts,
    json_text,
    media_in_base64,
    schema_text,
)
from millstream_server.processor.http.schema import read
from millstream_server.processor.text.messages import (
    ChatMessage,
    ChatRole,
    MediaPart,
    Tool,
    ToolCall,
)
from millstream_server.processor.text.switches import Switches, reasoning
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError

AskedT = TypeVar("AskedT", bound=schema.Count)
_NO_INSTRUCTION = "x-anthropic-billing-header:"
"""Begins a block that Claude Code puts first and changes from request to request: left in, no KV
cache would be hit."""

Parts = tuple[str | MediaPart, ...]

_MESSAGES = msgspec.json.Decoder(schema.Messages)
_COUNTS = msgspec.json.Decoder(schema.Count)


def read_messages(body: bytes) -> tuple[schema.Messages, tuple[ChatMessage, ...]]:
    """Read the body of /v1/messages, and convert the messages.

    Raises:
        ServingError: it can't be read, has too much of something, or a part that isn't taken.
    """
    asked = _checked(read(_MESSAGES, body, schema.UNSUPPORTED))
    if goes_on(asked):
        _check_prefill(asked)
    return asked, _messages_of(asked)


def read_count(body: bytes) -> tuple[schema.Count, tuple[ChatMessage, ...]]:
    """Read the body of /v1/messages/count_tokens, as that of /v1/messages; it has no media."""
    asked = _checked(read(_COUNTS, body, {}))
    return asked, _messages_of(asked, with_media=False)


def _checked(asked: AskedT) -> AskedT:
    parts = [_blocks(message.content) for message in asked.messages]
    check_counts(asked.messages, parts, asked.tools)
    return asked


def goes_on(asked: schema.Count) -> bool:
    """Whether the last message is a prefill: the assistant's, in which the answer goes on."""
    last = asked.messages[-1] if asked.messages else None
    return last is not None and last.role == "assistant" and not _is_empty(last)


def _is_empty(message: schema.Message) -> bool:
    """Whether a message says nothing: as the assistant's last one it asks for an answer, too."""
    blocks = message.content
    return not blocks or (
        not isinstance(blocks, str)
        and all(isinstance(block, schema.TextBlock) and not block.text for block in blocks)
    )


def _check_prefill(asked: schema.Messages) -> None:
    """Refuse what Anthropic refuses of a prefill.

    Raises:
        InvalidRequestError: it ends with whitespace or reasoning, or something else excludes it.
    """
    if asked.thinking is not None and asked.thinking.type != "disabled":
        why = "can't be used where the last message is the assistant's: the answer goes on in it"
        raise InvalidRequestError.of("thinking", why)
    content = asked.messages[-1].content
    path = f"messages[{len(asked.messages) - 1}].content"
    last = schema.TextBlock(content) if isinstance(content, str) else content[-1]
    if isinstance(last, (schema.ThinkingBlock, schema.RedactedBlock)):
        why = "the last block of the assistant's last message can't be reasoning; end it with text"
        raise InvalidRequestError.of(path, why)
    if isinstance(last, schema.TextBlock) and last.text[-1:].isspace():
        why = "the assistant's last message can't end with whitespace; the answer goes on in it"
        raise InvalidRequestError.of(path, why)


def _blocks(content: object) -> int:
    """Count blocks, with those of tools' results."""
    if not isinstance(content, list):
        return 0
    results = [block.content for block in content if isinstance(block, schema.ToolResultBlock)]
    return len(content) + sum(map(_blocks, results))


def options_of(asked: schema.Messages) -> Options:
    """Convert the options of an answer."""
    sampling: dict[str, Any] = {"max_new_tokens": asked.max_tokens}
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(asked, name)) is not None:
            sampling[name] = value
    if (form := output_format_of(asked)) is not None:
        text = bytes(form.schema).decode()
        sampling["constraint"] = Constraint(ConstraintKind.JSON_SCHEMA, text)
    return Options(
        path="",
        sampling=sampling,
        stops=tuple(asked.stop_sequences or ()),
        min_interval_s=0.0 if asked.stream else WHOLE_INTERVAL_S,
        session=_session_of(asked.metadata),
    )


def _session_of(metadata: schema.Metadata | None) -> str:
    """Return the user as a session's key: Claude Code's has its session's id, and is longer."""
    if metadata is None or not metadata.user_id:
        return ""
    return hashlib.sha256(metadata.user_id.encode()).hexdigest()


def output_format_of(asked: schema.Count) -> schema.OutputFormat | None:
    """Return what the answer's text has to be; None: anything."""
    return asked.output_config.format if asked.output_config else None


def answers_of(asked: schema.Count) -> AnswerOptions:
    """Convert what is asked of the answer. Clients ask every model to reason.

    Raises:
        InvalidRequestError: it is contradictory.
    """
    choice, only = asked.tool_choice, ""
    kind = "auto" if choice is None else choice.type
    if choice is not None and kind == "tool":
        only = choice.name or ""
        if only not in [tool.name for tool in asked.tools or ()]:
            raise InvalidRequestError.of("tool_choice.name", "is none of tools")
    must_call = kind in {"any", "tool"}
    if must_call and not asked.tools:
        raise InvalidRequestError.of("tool_choice", "asks for a call, and there are no tools")
    return AnswerOptions(
        events=None,
        with_tools=kind != "none",
        one_call=choice is not None and choice.disable_parallel_tool_use is True,
        must_call=must_call,
        only=only,
        continues=goes_on(asked),
        switches=_switches(asked),
        if_known=True,
    )


def _switches(asked: schema.Count) -> Switches:
    on = None if asked.thinking is None else asked.thinking.type != "disabled"
    effort = asked.output_config.effort if asked.output_config else None
    return reasoning(("thinking", on), ("output_config.effort", effort))


def tools_of(asked: schema.Count) -> list[Tool]:
    """Convert the tools; the schemas stay as they were written."""
    return [
        Tool(
            tool.name,
            tool.description or "",
            schema_text(bytes(tool.input_schema)),
            bool(tool.strict),
        )
        for tool in asked.tools or ()
    ]


# ---- messages ------------------------------------------------------------------------------------


def _messages_of(asked: schema.Count, *, with_media: bool = True) -> tuple[ChatMessage, ...]:
    found: list[ChatMessage] = []
    if asked.system:
        found.append(_system(asked.system, "system", "system"))
    last = len(asked.messages) - 1
    for index, message in enumerate(asked.messages):
        path = f"messages[{index}]"
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [schema.TextBlock(blocks)]
        if message.role == "system":
            found.append(_system(blocks, path, f"{path}.content"))
        elif message.role == "assistant":
            if index < last or not _is_empty(message):
                found.append(_assistant(blocks, path))
        else:
            found += _user(blocks, path, with_media=with_media)
    return tuple(found)


def _system(said: str | Sequence[schema.Block], path: str, at: str) -> ChatMessage:
    """Convert instructions; ``at`` is the path of their blocks."""
    blocks = [schema.TextBlock(said)] if isinstance(said, str) else said
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, schema.TextBlock):
            raise InvalidRequestError.of(f"{at}[{index}]", "must be text")
        if not block.text.startswith(_NO_INSTRUCTION):
            texts.append(block.text)
    return ChatMessage(ChatRole.SYSTEM, "\n".join(texts), field=path)


def _assistant(blocks: Sequence[schema.Block], path: str) -> ChatMessage:
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for index, block in enumerate(blocks):
        if isinstance(block, schema.TextBlock):
            texts.append(block.text)
        elif isinstance(block, schema.ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, schema.ToolUseBlock):
            calls.append(ToolCall(block.id, block.name, json_text(block.input)))
        elif not isinstance(block, schema.RedactedBlock):
            raise InvalidRequestError.of(f"{path}.content[{index}]", "isn't an assistant's")
    return ChatMessage(
        ChatRole.ASSISTANT,
        "".join(texts),
        tuple(calls),
        field=path,
        reasoning="".join(thoughts),
    )


def _user(blocks: Sequence[schema.Block], path: str, *, with_media: bool) -> Iterator[ChatMessage]:
    """Convert one message: results of tools are messages of their own, in order."""
    parts: list[str | MediaPart] = []
    for index, block in enumerate(blocks):
        at = f"{path}.content[{index}]"
        if isinstance(block, schema.ToolResultBlock):
            if parts:
                yield _message(ChatRole.USER, tuple(parts), path)
                parts = []
            result = _result(block, at, with_media=with_media)
            yield _message(ChatRole.TOOL, result, at, block.tool_use_id)
        else:
            parts.append(_part(block, at, with_media=with_media))
    if parts:
        yield _message(ChatRole.USER, tuple(parts), path)


def _result(block: schema.ToolResultBlock, path: str, *, with_media: bool) -> Parts:
    content = block.content or ""
    if isinstance(content, str):
        return (content,)
    return tuple(
        _part(each, f"{path}.content[{index}]", with_media=with_media)
        for index, each in enumerate(content)
    )


def _message(role: ChatRole, parts: Parts, path: str, call_id: str = "") -> ChatMessage:
    text = "".join([part for part in parts if isinstance(part, str)])
    has_media = any(not isinstance(part, str) for part in parts)
    return ChatMessage(
        role, text, tool_call_id=call_id, field=path, parts=parts if has_media else ()
    )


def _part(block: schema.Block, path: str, *, with_media: bool) -> str | MediaPart:
    if isinstance(block, schema.TextBlock):
        return block.text
    if isinstance(block, schema.ImageBlock):
        source = block.source
        if not with_media:
            raise UnsupportedFeatureError.of(path, "tokens of images can't be counted beforehand")
        if isinstance(source, schema.UrlSource):
            return MediaPart(Modality.IMAGE, f"{path}.source.url", url=source.url)
        if isinstance(source, schema.Base64Source):
            return media_in_base64(Modality.IMAGE, source.data, f"{path}.source.data")
    raise UnsupportedFeatureError.of(path, "this server takes text and images in messages of users")
