"""What chats, completions, messages and lists of models answer, and failures, for the document.

The answers themselves are written piece by piece (`output`, `anthropic_output`). A test compares
them with these.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Finish = Literal["stop", "length", "tool_calls"]


class PromptTokens(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokens(msgspec.Struct):
    """Of the answer's tokens."""

    reasoning_tokens: int


class TokenUsage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class TopLogprob(msgspec.Struct):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(msgspec.Struct):
    """A token that came."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct):
    """Of all tokens of a choice."""

    content: list[Logprob]
    refusal: None


class AnsweredFunction(msgspec.Struct):
    """A call's tool, and its arguments as text."""

    name: str
    arguments: str


class AnsweredCall(msgspec.Struct):
    """A call."""

    id: str
    function: AnsweredFunction
    type: Literal["function"]


class ChatAnswer(msgspec.Struct):
    """What a model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One of `n` answers."""

    index: int
    message: ChatAnswer
    logprobs: Logprobs | None
    finish_reason: Finish | None


class ChatCompletion(msgspec.Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage


class ChunkChoice(msgspec.Struct):
    """What is new of an answer: `delta` has fields of a message."""

    index: int
    delta: dict[str, Any]
    logprobs: Logprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(msgspec.Struct):
    """An event of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: TokenUsage | msgspec.UnsetType | None = msgspec.UNSET


class TextLogprobs(msgspec.Struct):
    """Logprobs of a completion, in lists of one length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    """One of `n` texts, or what is new of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextCompletion(msgspec.Struct):
    """The answer of /v1/completions, and each event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage | msgspec.UnsetType | None = msgspec.UNSET


class ListedModel(msgspec.Struct):
    """A name that requests may use; `root` is the model's own, `tasks` what it does now."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    tasks: list[str]
    type: Literal["model"]
    lifecycle: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct):
    """The answer of /v1/models."""

    data: list[ListedModel]
    object: Literal["list"]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ResponseEvent(msgspec.Struct):
    """An event of /v1/responses: what else it has depends on its type."""

    type: str
    sequence_number: int


class MessageUsage(msgspec.Struct):
    """Counts of tokens, as Anthropic has them."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class MessageAnswer(msgspec.Struct):
    """The answer of /v1/messages; its blocks are of text, thinking or tool_use."""

    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"]
    role: Literal["assistant"]


class MessageEvent(msgspec.Struct):
    """An event of /v1/messages, of the types that Anthropic has."""

    type: str


class TokenCount(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class Error(msgspec.Struct):
    """A failure; `param` is the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of a failure, and what an event says of one."""

    error: Error


class MessageError(msgspec.Struct):
    """A failure, as Anthropic says it."""

    type: str
    message: str


class MessageErrorBody(msgspec.Struct):
    """The body of a failure at Anthropic's endpoints."""

    error: MessageError
    type: Literal["error"]
