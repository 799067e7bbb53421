"""Bodies of /tokenize and /detokenize, and the answers of both and of …/render: vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millstream_server.processor.http.schema import Message, TemplateOptions, TokenId, Tool


class Tokenize(msgspec.Struct, kw_only=True):
    """The body of /tokenize: a prompt, or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Refused
    chat_template: str | None = None


class Detokenize(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[TokenId]
    model: str = ""
    skip_special_tokens: bool | None = None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"chat_template": (None,)}
"""Fields that are refused, and values that ask for nothing."""


# ---- answers -------------------------------------------------------------------------------------


class Tokenized(msgspec.Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str


class Placeholder(msgspec.Struct):
    """Where tokens of an image or a video are."""

    offset: int
    length: int


class Features(msgspec.Struct):
    """The media of a prompt, by kind."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Placeholder]]


class SamplingParams(msgspec.Struct, kw_only=True):
    """How an answer is sampled, the model's defaults filled in."""

    max_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_tokens: int
    ignore_eos: bool
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    logit_bias: dict[str, float]
    structured_outputs: dict[str, str] | None


class Rendered(msgspec.Struct):
    """The answer of /v1/chat/completions/render: a request of token ids."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt_text: str
    sampling_params: SamplingParams
    features: Features | None
    cache_salt: str | None
    stream: bool = False
