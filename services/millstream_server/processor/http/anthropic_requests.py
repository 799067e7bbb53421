"""From a Messages body to the plain types of the pipeline. No side effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from millstream_server.media.items import Modality
from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.conversation import Conversation, Options
from millstream_server.processor.http import anthropic_schema as schema
from millstream_server.processor.http.requests import (
    MAX_MESSAGES,
    WHOLE_INTERVAL_S,
    media_in_base64,
    schema_text,
)
from millstream_server.processor.text.messages import (
    ChatMessage,
    ChatRole,
    MediaPart,
    Tool,
    ToolCall,
)
from millstream_server.processor.text.switches import Switches, thinking
from millstream_server.processor.text.template import ChatTemplate
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError

Parts = tuple[str | MediaPart, ...]


def options_of(asked: schema.Messages) -> Options:
    """Convert the options of an answer."""
    sampling: dict[str, Any] = {"max_new_tokens": asked.max_tokens}
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(asked, name)) is not None:
            sampling[name] = value
    return Options(
        path="",
        sampling=sampling,
        stops=tuple(asked.stop_sequences or ()),
        min_interval_s=0.0 if asked.stream else WHOLE_INTERVAL_S,
    )


def answers_of(
    asked: schema.Count, template: ChatTemplate | None, *, events: bool
) -> AnswerOptions:
    """Convert what is asked of the answer; ``template`` is the model's, if it is known.

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
        events=events,
        with_tools=kind != "none",
        one_call=choice is not None and choice.disable_parallel_tool_use is True,
        must_call=must_call,
        only=only,
        switches=_switches(asked.thinking, template),
    )


def _switches(asked: schema.Thinking | None, template: ChatTemplate | None) -> Switches:
    """Return the switch of reasoning; nothing if the template doesn't let one choose.

    Clients ask for it of every model.
    """
    if asked is None or template is None:
        return {}
    switches = {"thinking": thinking(on=asked.type != "disabled")}
    try:
        template.variable(switches["thinking"], "thinking")
    except UnsupportedFeatureError:
        return {}
    return switches


def tools_of(asked: schema.Count) -> list[Tool]:
    """Convert the tools; the schemas stay as they were written."""
    return [
        Tool(tool.name, tool.description or "", schema_text(bytes(tool.input_schema)))
        for tool in asked.tools or ()
    ]


# ---- messages ------------------------------------------------------------------------------------


def messages_of(asked: schema.Count, conversation: Conversation | None) -> tuple[ChatMessage, ...]:
    """Convert the messages. Without a ``conversation``, which holds files, media are refused.

    Raises:
        ServingError: there are none or too many, or a part of one can't be taken.
    """
    if not 0 < len(asked.messages) <= MAX_MESSAGES:
        raise InvalidRequestError.of("messages", f"1 to {MAX_MESSAGES} are needed")
    found: list[ChatMessage] = []
    if asked.system:
        text = asked.system
        if not isinstance(text, str):
            text = "\n".join([block.text for block in text])
        found.append(ChatMessage(ChatRole.SYSTEM, text, field="system"))
    for index, message in enumerate(asked.messages):
        path = f"messages[{index}]"
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [schema.TextBlock(blocks)]
        if message.role == "assistant":
            found.append(_assistant(blocks, path))
        else:
            found += _user(blocks, path, conversation)
    return tuple(found)


def _assistant(blocks: Sequence[schema.Block], path: str) -> ChatMessage:
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for index, block in enumerate(blocks):
        if isinstance(block, schema.TextBlock):
            texts.append(block.text)
        elif isinstance(block, schema.ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, schema.ToolUseBlock):
            calls.append(ToolCall(block.id, block.name, bytes(block.input).decode()))
        elif not isinstance(block, schema.RedactedBlock):
            raise InvalidRequestError.of(f"{path}.content[{index}]", "isn't an assistant's")
    return ChatMessage(
        ChatRole.ASSISTANT,
        "".join(texts),
        tuple(calls),
        field=path,
        reasoning="".join(thoughts),
    )


def _user(
    blocks: Sequence[schema.Block], path: str, conversation: Conversation | None
) -> Iterator[ChatMessage]:
    """Convert one message: results of tools are messages of their own, in order."""
    parts: list[str | MediaPart] = []
    for index, block in enumerate(blocks):
        at = f"{path}.content[{index}]"
        if isinstance(block, schema.ToolResultBlock):
            if parts:
                yield _message(ChatRole.USER, tuple(parts), path)
                parts = []
            yield _message(ChatRole.TOOL, _result(block, at, conversation), at, block.tool_use_id)
        else:
            parts.append(_part(block, at, conversation))
    if parts:
        yield _message(ChatRole.USER, tuple(parts), path)


def _result(block: schema.ToolResultBlock, path: str, conversation: Conversation | None) -> Parts:
    content = block.content or ""
    if isinstance(content, str):
        return (content,)
    return tuple(
        _part(each, f"{path}.content[{index}]", conversation) for index, each in enumerate(content)
    )


def _message(role: ChatRole, parts: Parts, path: str, call_id: str = "") -> ChatMessage:
    text = "".join([part for part in parts if isinstance(part, str)])
    has_media = any(not isinstance(part, str) for part in parts)
    return ChatMessage(
        role, text, tool_call_id=call_id, field=path, parts=parts if has_media else ()
    )


def _part(block: schema.Block, path: str, conversation: Conversation | None) -> str | MediaPart:
    if isinstance(block, schema.TextBlock):
        return block.text
    if isinstance(block, schema.ImageBlock):
        source = block.source
        if conversation is None:
            raise UnsupportedFeatureError.of(path, "tokens of images can't be counted beforehand")
        if isinstance(source, schema.UrlSource):
            return MediaPart(Modality.IMAGE, f"{path}.source.url", url=source.url)
        if isinstance(source, schema.Base64Source):
            return media_in_base64(Modality.IMAGE, source.data, f"{path}.source.data", conversation)
    raise UnsupportedFeatureError.of(path, "this server takes text and images in messages of users")
