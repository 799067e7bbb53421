"""The response of the Responses API: what came of a request, and what the request asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from millstream_server.processor.http.output import CompletionTokens, PromptTokens, encode
from millstream_server.processor.http.responses import schema
from millstream_server.processor.http.responses.tools import Tools

if TYPE_CHECKING:
    from millstream_server.processor.turn import Turn


class InputTokens(PromptTokens):
    """Of the input's tokens; those written to a cache, which OpenAI bills, aren't counted here."""

    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Counts of tokens, as the Responses API has them."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: CompletionTokens
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why an answer has failed."""

    code: str
    message: str


class Incomplete(msgspec.Struct):
    """Why an answer was cut."""

    reason: str = "max_output_tokens"


class Outcome(msgspec.Struct, kw_only=True):
    """The answer of /v1/responses: what came of a request."""

    id: str
    status: str
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    output: Sequence[dict[str, Any]] = ()
    usage: ResponseUsage | None = None


class Repeated(msgspec.Struct, kw_only=True):
    """The rest of a response: what was asked for, and what counts where nothing was."""

    object: str = "response"
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: schema.Reasoning
    text: schema.Text
    tool_choice: str | schema.ToolChoice
    tools: Sequence[dict[str, Any]]
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None
    previous_response_id: None = None
    store: bool = False
    background: bool = False
    truncation: str = "disabled"
    service_tier: str = "default"
    top_logprobs: int = 0


_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


class Shown:
    """Writes the response of one request."""

    def __init__(self, asked: schema.Responses, tools: Tools) -> None:
        """Keep what the request asked for."""
        form = asked.text.format if asked.text else None
        self._asked = Repeated(
            created_at=int(time.time()),
            model=asked.model,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            max_tool_calls=asked.max_tool_calls,
            metadata=asked.metadata or {},
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            reasoning=schema.Reasoning(asked.reasoning.effort if asked.reasoning else None),
            text=schema.Text(form or schema.TextFormat("text"), "medium"),
            tool_choice=asked.tool_choice or "auto",
            tools=tools.shown,
            prompt_cache_key=asked.prompt_cache_key,
            safety_identifier=asked.safety_identifier,
            user=asked.user,
        )
        self._repeated = b""
        """``_asked`` as JSON, without its opening brace; empty: not made yet."""

    def response(
        self, answer_id: str, turn: Turn, status: str, items: Sequence[dict[str, Any]]
    ) -> bytes:
        """Write it as it is now."""
        if not self._repeated:
            self._asked.model = turn.request.model
            if not turn.switched:
                self._asked.reasoning = schema.Reasoning(None)
            for name in _SAMPLED:
                setattr(self._asked, name, getattr(turn.request.sampling, name))
            self._repeated = encode(self._asked)[1:]
        came = Outcome(id=f"resp_{answer_id}", status=status, output=items)
        if status != "in_progress":
            came.usage = _usage_of(turn)
        if status == "completed":
            came.completed_at = int(time.time())
        elif status == "incomplete":
            came.incomplete_details = Incomplete()
        return encode(came)[:-1] + b"," + self._repeated

    def failed(self, answer_id: str, code: str, message: str) -> bytes:
        """Write the response of an answer that has failed, without what is long.

        An event that ends a stream has to fit in one frame.
        """
        came = Outcome(id=f"resp_{answer_id}", status="failed", error=ResponseError(code, message))
        asked = msgspec.structs.replace(
            self._asked,
            tools=(),
            instructions=None,
            metadata={},
            text=schema.Text(verbosity="medium"),
        )
        return encode(came)[:-1] + b"," + encode(asked)[1:]


def _usage_of(turn: Turn) -> ResponseUsage:
    used = turn.usage()
    prompt, completion = used.prompt_tokens, used.completion_tokens
    return ResponseUsage(
        prompt,
        InputTokens(used.cached_tokens),
        completion,
        CompletionTokens(used.reasoning_tokens),
        prompt + completion,
    )
