"""Makes request messages from plain values."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from millstream.v1 import chat_pb2, processor_pb2
from millstream_client import openai_shapes
from millstream_client.knobs import Knobs, generation_options
from millstream_client.media import Image, Part, Video

if TYPE_CHECKING:
    from typing import Unpack

Content = Part | Sequence[Part]
"""What one message says: a text, an image, a video, or several of them in order."""
TextInput = str | Sequence[chat_pb2.ChatMessage | Mapping[str, Any]]
"""A text, or a whole conversation."""
TextOrIds = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True, slots=True)
class MediaMessage:
    """A message with images or videos, whose files are read when it is sent."""

    role: chat_pb2.ChatRole.ValueType
    content: tuple[Part, ...]
    tool_call_id: str = ""
    tool_calls: tuple[chat_pb2.ToolCall, ...] = ()
    name: str = ""
    reasoning: str = ""

    def read(self) -> chat_pb2.ChatMessage:
        """Make the contract's message of it; blocks while it reads the files.

        Raises:
            MediaFileError: a file can't be read.
        """
        return chat_pb2.ChatMessage(
            role=self.role,
            content=[
                chat_pb2.ContentPart(text=part) if isinstance(part, str) else part.read()
                for part in self.content
            ],
            tool_call_id=self.tool_call_id,
            tool_calls=self.tool_calls,
            name=self.name,
            reasoning=self.reasoning,
        )


AnyMessage = chat_pb2.ChatMessage | MediaMessage
GivenMessage = AnyMessage | Mapping[str, Any]
"""A message, or a dict in the shape of OpenAI's chat API."""
ChatInput = Part | Sequence[Part | GivenMessage]
"""A question, or a whole conversation: a list has parts of one question, or messages.

It is one type of list, since type checkers can't tell two apart while they read a literal.
"""


def message(
    role: chat_pb2.ChatRole.ValueType, parts: Iterable[Part], tool_call_id: str = ""
) -> AnyMessage:
    """Make a message; only one with images or videos is a MediaMessage.

    Raises:
        TypeError: a part is neither text nor image nor video.
    """
    made = MediaMessage(role, tuple(parts), tool_call_id)
    for part in made.content:
        if not isinstance(part, Part):
            raise TypeError(f"a part is a str, an Image or a Video, not {type(part).__name__}")
    return _plain(made)


def _plain(made: MediaMessage) -> AnyMessage:
    return made.read() if all(isinstance(part, str) for part in made.content) else made


def system(text: str) -> chat_pb2.ChatMessage:
    """Make a system message: the operator's instructions."""
    return _text(chat_pb2.CHAT_ROLE_SYSTEM, text)


@overload
def user(*content: str) -> chat_pb2.ChatMessage: ...
@overload
def user(*content: Part) -> AnyMessage: ...
def user(*content: Part) -> AnyMessage:
    """Make a user's message of texts, images and videos, in any order."""
    return message(chat_pb2.CHAT_ROLE_USER, content)


def assistant(text: str) -> chat_pb2.ChatMessage:
    """Make a message of the model."""
    return _text(chat_pb2.CHAT_ROLE_ASSISTANT, text)


@overload
def tool_result(tool_call_id: str, *content: str) -> chat_pb2.ChatMessage: ...
@overload
def tool_result(tool_call_id: str, *content: Part) -> AnyMessage: ...
def tool_result(tool_call_id: str, *content: Part) -> AnyMessage:
    """Make a message with the result of a tool call: texts, images, videos."""
    return message(chat_pb2.CHAT_ROLE_TOOL, content, tool_call_id)


def _text(role: chat_pb2.ChatRole.ValueType, text: str) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text)])


def messages(
    said: ChatInput, system_text: str | None = None, media: Sequence[Image | Video] = ()
) -> list[AnyMessage]:
    """Make messages of a question or a conversation, after the system text if given.

    ``media`` comes before the question's text.

    Raises:
        TypeError: there is neither, or ``media`` and a conversation.
        ValueError: a dict has something that can't be sent.
    """
    first: list[AnyMessage] = [system(system_text)] if system_text else []
    if isinstance(said, Part) or any(isinstance(part, Part) for part in said):
        return [*first, question(said, media)]
    if media:
        raise TypeError(
            "image= and video= go with a question; in a list of messages write"
            " user('What is this?', Image('cat.png'))"
        )
    return [*first, *map(_given, said)]


def _given(given: Any) -> AnyMessage:
    """Return a message as it is, and make one of a dict."""
    if isinstance(given, AnyMessage):
        return given
    return _plain(MediaMessage(**openai_shapes.message_fields(given)))


def question(said: Any, media: Sequence[Image | Video] = ()) -> AnyMessage:
    """Make a user's message of content, after ``media``."""
    parts = [said] if isinstance(said, Part) else list(said)
    if media and parts == [""]:
        parts = []
    return message(chat_pb2.CHAT_ROLE_USER, [*media, *parts])


async def read_messages(said: Iterable[AnyMessage]) -> list[chat_pb2.ChatMessage]:
    """Make the contract's messages; files are read in a thread.

    Raises:
        MediaFileError: a file can't be read.
    """
    return [
        await asyncio.to_thread(one.read) if isinstance(one, MediaMessage) else one for one in said
    ]


class RequestKnobs(Knobs, total=False):
    """What every generation may be given."""

    model: str
    request_id: str


class ChatKnobs(RequestKnobs, total=False):
    """What a conversation may be given for all its turns."""

    tools: Sequence[openai_shapes.Tool]
    tool_choice: openai_shapes.ToolChoice
    parallel_tool_calls: bool
    reasoning: processor_pb2.ReasoningOptions | bool | str
    """Whether the model reasons, or how much, in its own words: "low"."""
    events: bool
    """Whether reasoning, text and calls are told apart; left out: if one of the above is given."""


def chat_start(
    *,
    model: str = "",
    tools: Sequence[openai_shapes.Tool] = (),
    tool_choice: openai_shapes.ToolChoice | None = None,
    parallel_tool_calls: bool | None = None,
    reasoning: processor_pb2.ReasoningOptions | bool | str | None = None,
    events: bool | None = None,
    request_id: str = "",
    **knobs: Unpack[Knobs],
) -> processor_pb2.ChatStart:
    """Make the first message of a Chat, without messages yet.

    Raises:
        TypeError: a knob is unknown, or has the wrong type; or a function can't be a tool.
        ValueError: a tool or a choice of one has something that can't be sent.
    """
    start = processor_pb2.ChatStart(
        model=model,
        tools=openai_shapes.tools(tools),
        options=generation_options(**knobs),
        request_id=request_id or new_request_id(),
        parallel_tool_calls=parallel_tool_calls,
        tool_choice=None if tool_choice is None else openai_shapes.tool_choice(tool_choice),
        reasoning=None if reasoning is None else _reasoning(reasoning),
    )
    if events is None:
        answers = (tool_choice, parallel_tool_calls, reasoning)
        events = bool(tools) or any(given is not None for given in answers)
    if events:
        start.output = processor_pb2.CHAT_OUTPUT_EVENTS
    return start


def _reasoning(
    given: processor_pb2.ReasoningOptions | bool | str,  # noqa: FBT001 - of several types
) -> processor_pb2.ReasoningOptions:
    if isinstance(given, processor_pb2.ReasoningOptions):
        return given
    if isinstance(given, bool):
        return processor_pb2.ReasoningOptions(enabled=given)
    return processor_pb2.ReasoningOptions(effort=given)


def complete_request(
    prompt: TextOrIds, *, model: str = "", request_id: str = "", **knobs: Unpack[Knobs]
) -> processor_pb2.CompleteRequest:
    """Make the request of Complete from text or token ids."""
    request = processor_pb2.CompleteRequest(
        model=model, options=generation_options(**knobs), request_id=request_id or new_request_id()
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)
    return request


def parse_request(
    said: TextOrIds, reading: processor_pb2.AnswerReading | None
) -> processor_pb2.ParseRequest:
    """Make the request of Parse for a whole answer, of text or token ids."""
    request = processor_pb2.ParseRequest(reading=reading or processor_pb2.AnswerReading())
    if isinstance(said, str):
        request.text = said
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(said)
    return request


def tokenize_request(
    said: TextInput, *, model: str, tools: Sequence[openai_shapes.Tool], special_tokens: bool
) -> processor_pb2.TokenizeRequest:
    """Make the request of Tokenize from raw text or a conversation."""
    if isinstance(said, str):
        return processor_pb2.TokenizeRequest(
            model=model, text=said, no_special_tokens=not special_tokens
        )
    plain: Any = [_given(message) for message in said]
    conversation = processor_pb2.Conversation(messages=plain, tools=openai_shapes.tools(tools))
    return processor_pb2.TokenizeRequest(model=model, conversation=conversation)


def new_request_id() -> str:
    """Make an id; made here, it is known even if the request fails before a response."""
    return secrets.token_hex(16)
