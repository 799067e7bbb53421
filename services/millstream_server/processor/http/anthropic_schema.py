"""Bodies of requests, as Anthropic's Messages API has them. What isn't here is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from millstream_server.processor.http.schema import ABSENT, Int32, Json


class Base64Source(Json, tag_field="type", tag="base64"):
    """A file in the body."""

    data: str


class UrlSource(Json, tag_field="type", tag="url"):
    """A file elsewhere."""

    url: str


class FileSource(Json, tag_field="type", tag="file"):
    """Refused."""


class TextBlock(Json, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class ImageBlock(Json, tag_field="type", tag="image"):
    """An image."""

    source: Base64Source | UrlSource | FileSource


class ThinkingBlock(Json, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer; its signature isn't checked."""

    thinking: str


class RedactedBlock(Json, tag_field="type", tag="redacted_thinking"):
    """Reasoning that no model here has made; ignored."""


class ToolUseBlock(Json, tag_field="type", tag="tool_use"):
    """A call of an earlier answer."""

    id: str
    name: str
    input: msgspec.Raw = ABSENT


class DocumentBlock(Json, tag_field="type", tag="document"):
    """Refused."""


class ToolResultBlock(Json, tag_field="type", tag="tool_result"):
    """What a call returned."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None


Block = (
    TextBlock
    | ImageBlock
    | ThinkingBlock
    | RedactedBlock
    | ToolUseBlock
    | ToolResultBlock
    | DocumentBlock
)


class Message(Json):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Json):
    """A tool that the client runs; others have another type, and are refused."""

    name: str
    description: str | None = None
    input_schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None
    type: Literal["custom"] | None = None


class ToolChoice(Json):
    """Whether tools may be called, or must."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Json):
    """Whether the model reasons. How much, in tokens, is ignored."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """What the answer's text has to be."""

    schema: msgspec.Raw


class OutputConfig(msgspec.Struct):
    """How the answer is made."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct):
    """What is known of the request."""

    user_id: str | None = None


class Count(Json, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    messages: list[Message]
    model: str = ""
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class Messages(Count, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Int32
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    metadata: Metadata | None = None
    # Refused
    container: msgspec.Raw = ABSENT
    mcp_servers: msgspec.Raw = ABSENT


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"container": (None,), "mcp_servers": (None, [])}
"""Fields that are refused, and values that ask for nothing."""
