"""The input of the Responses API as messages: neighbouring items of an answer become one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millstream_server.media.items import Modality
from millstream_server.processor.http.requests import json_text, media_at
from millstream_server.processor.http.responses import schema
from millstream_server.processor.http.responses.tools import (
    SEARCH,
    arguments_of,
    told_name,
    told_names,
)
from millstream_server.processor.http.schema import read
from millstream_server.processor.text.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    ChatMessage,
    ChatRole,
    MediaPart,
    ToolCall,
)
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.frozen import dataclass

Parts = tuple[str | MediaPart, ...]

_RESPONSES = msgspec.json.Decoder(schema.Responses)
_SEARCH_CALL = "tool_search_call"
_CALLS = {"function_call", "custom_tool_call", _SEARCH_CALL}
_RESULTS = {"function_call_output", "custom_tool_call_output"}


@dataclass(frozen=True, slots=True)
class Read:
    """A body, and its input and instructions as messages."""

    asked: schema.Responses
    messages: tuple[ChatMessage, ...]
    calls: dict[str, str]
    """Where the calls of messages are in the body, by their paths in the messages."""


def read_body(body: bytes) -> Read:
    """Read a body, and convert its messages.

    Raises:
        ServingError: it can't be read, has no input, too much of something, or what isn't taken.
    """
    asked = read(_RESPONSES, body, schema.UNSUPPORTED)
    items = asked.input
    if not isinstance(items, str):
        if items is None or not 0 < len(items) <= MAX_MESSAGES:
            sentence = f"a text, or 1 to {MAX_MESSAGES} items, are needed"
            raise InvalidRequestError.of("input", sentence)
        parts = [len(item.content) for item in items if isinstance(item.content, list)]
        if sum(parts) > MAX_PARTS:
            raise InvalidRequestError.of("input", f"at most {MAX_PARTS} content parts in all")
    calls: dict[str, str] = {}
    if isinstance(items, str):
        messages = [ChatMessage(ChatRole.USER, items, field="input")]
    else:
        messages = _Messages(calls).of(items)
    if asked.instructions:
        messages.insert(0, ChatMessage(ChatRole.SYSTEM, asked.instructions, field="instructions"))
    return Read(asked, tuple(messages), calls)


class _Messages:
    """Makes messages of items."""

    def __init__(self, paths: dict[str, str]) -> None:
        self._paths = paths
        self._made: list[ChatMessage] = []
        self._path = ""
        """Of the first item of the answer that is being joined; empty: there is none."""
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []

    def of(self, items: Sequence[schema.Item]) -> list[ChatMessage]:
        for index, item in enumerate(items):
            self._add(item, f"input[{index}]")
        self._end_answer()
        return self._made

    def _add(self, item: schema.Item, path: str) -> None:
        if item.type in _CALLS or item.type == "reasoning":
            self._continue_answer(item, path)
        elif item.type == "message" and item.role == "assistant":
            self._path = self._path or path
            self._texts.append(_text(self._parts(item.content, f"{path}.content")))
        elif item.type == "message":
            role = ChatRole(_needed(item.role, f"{path}.role"))
            self._message(role, self._parts(item.content, f"{path}.content"), path)
        elif item.type in _RESULTS:
            call_id = _needed(item.call_id, f"{path}.call_id")
            self._message(ChatRole.TOOL, self._parts(item.output, f"{path}.output"), path, call_id)
        elif item.type == "tool_search_output":
            names = [name for tool in item.tools or () for name in told_names(tool)]
            found = f"These tools can be called now: {', '.join(names)}" if names else "none"
            call_id = _needed(item.call_id, f"{path}.call_id")
            self._message(ChatRole.TOOL, (found,), path, call_id)
        elif item.type == "agent_message":  # of another of the client's agents
            said = self._parts(item.content, f"{path}.content")
            head = f"From {item.author or 'an agent'} to {item.recipient or 'you'}:\n"
            self._message(ChatRole.USER, (head, *said), path)
        elif item.type != "additional_tools" and not item.type.startswith(schema.LEFT_OUT):
            sentence = f"{item.type[:64]!r} is not supported by this server"
            raise UnsupportedFeatureError.of(f"{path}.type", sentence)

    def _continue_answer(self, item: schema.Item, path: str) -> None:
        self._path = self._path or path
        if item.type == "reasoning":
            self._thoughts.append(_text(self._parts(item.content, f"{path}.content")))
            return
        if item.type == "custom_tool_call":
            arguments = arguments_of(item.input or "")
        else:
            arguments = json_text(item.arguments)
        if item.type == _SEARCH_CALL:
            name = SEARCH
        else:
            name = told_name(_needed(item.name, f"{path}.name"), item.namespace or "")
        call_id = _needed(item.call_id, f"{path}.call_id")
        self._paths[f"{self._path}.tool_calls[{len(self._calls)}]"] = path
        self._calls.append(ToolCall(call_id, name, arguments))

    def _message(self, role: ChatRole, parts: Parts, path: str, call_id: str = "") -> None:
        self._end_answer()
        has_media = any(not isinstance(part, str) for part in parts)
        self._made.append(
            ChatMessage(
                role,
                _text(parts),
                tool_call_id=call_id,
                field=path,
                parts=parts if has_media else (),
            )
        )

    def _end_answer(self) -> None:
        if not self._path:
            return
        self._made.append(
            ChatMessage(
                ChatRole.ASSISTANT,
                "".join(self._texts),
                tuple(self._calls),
                field=self._path,
                reasoning="".join(self._thoughts),
            )
        )
        self._path, self._texts, self._thoughts, self._calls = "", [], [], []

    def _parts(self, content: str | list[schema.Part] | None, path: str) -> Parts:
        if content is None or isinstance(content, str):
            return (content or "",)
        return tuple(self._part(part, f"{path}[{index}]") for index, part in enumerate(content))

    def _part(self, part: schema.Part, path: str) -> str | MediaPart:
        if isinstance(part, schema.Refusal):
            return part.refusal
        if isinstance(part, schema.InputImage):
            if not part.image_url:
                raise UnsupportedFeatureError.of(path, "only images with an image_url")
            return media_at(Modality.IMAGE, part.image_url, f"{path}.image_url")
        if isinstance(part, schema.InputFile | schema.InputAudio):
            raise UnsupportedFeatureError.of(path, "this server takes text and images")
        return part.text


def _needed(value: str | None, path: str) -> str:
    if not value:
        raise InvalidRequestError.of(path, "is missing")
    return value


def _text(parts: Parts) -> str:
    return "".join([part for part in parts if isinstance(part, str)])
