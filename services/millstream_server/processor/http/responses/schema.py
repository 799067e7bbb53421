"""Bodies of requests, as OpenAI's Responses API has them. What isn't here is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from millstream_server.processor.http import schema

LEFT_OUT = "web_search"
"""Begins the types of what agents send to every server, and which asks for nothing here: a tool of
OpenAI's servers, and its calls in their histories."""


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """A piece of text from outside."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A piece of an earlier answer."""

    text: str


class PlainText(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text, as some clients write it."""

    text: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A piece of an earlier answer's reasoning."""

    text: str


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    """What an earlier answer refused."""

    refusal: str


class InputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    """An image; one that was uploaded before (``file_id``) is refused."""

    image_url: str | None = None
    file_id: str | None = None


class InputFile(msgspec.Struct, tag_field="type", tag="input_file"):
    """Refused."""


class InputAudio(msgspec.Struct, tag_field="type", tag="input_audio"):
    """Refused."""


Part = (
    InputText
    | OutputText
    | PlainText
    | ReasoningText
    | Refusal
    | InputImage
    | InputFile
    | InputAudio
)


class InputFormat(msgspec.Struct, omit_defaults=True):
    """What the input of a custom tool has to be."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class Tool(msgspec.Struct):
    """A tool, or a namespace of tools. Which fields it has depends on its type."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = schema.ABSENT
    strict: bool | None = None
    format: InputFormat | None = None
    tools: list[Tool] | None = None
    execution: str | None = None
    """Of a search for tools: who does it."""


class Item(msgspec.Struct):
    """A part of the conversation. Which fields it has depends on its type.

    Not a class for each type: a message's type may be left out.
    """

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: msgspec.Raw = schema.ABSENT
    """A function call's; an object in a search for tools."""
    input: str | None = None
    """A custom tool call's."""
    output: str | list[Part] | None = None
    """What a call returned."""
    tools: list[Tool] | None = None
    """Tools that can be called from here on."""
    author: str | None = None
    recipient: str | None = None


class ToolChoice(msgspec.Struct, omit_defaults=True):
    """The one tool that must be called, or those that may be (``allowed_tools``)."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolChoice] | None = None


class Reasoning(msgspec.Struct):
    """How much the model reasons. Summaries aren't made: the reasoning itself is sent."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """What an answer's text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    strict: bool | None = None


class Text(msgspec.Struct):
    """How an answer's text is."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Responses(schema.Generation, kw_only=True):
    """The body of /v1/responses."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    include: list[str] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    # Only repeated in the response
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None
    safety_identifier: str | None = None
    user: str | None = None
    # Refused
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: str | None = None
    top_logprobs: int | None = None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),
    "n": (None, 1),
    "max_tokens": (None,),
    "prompt_logprobs": (None,),
    "use_beam_search": (None, False),
}
"""Fields that are refused, and values that ask for nothing."""
