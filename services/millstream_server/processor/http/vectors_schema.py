"""Bodies of /v1/embeddings, /v1/rerank and /v1/score, and of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from millstream_server.processor.http.schema import Int32, TokenId

Priority = Literal["low", "normal", "high"]


Inputs = str | list[str | TokenId | list[TokenId]]
"""Of /v1/embeddings; lists have one kind. Read when they were counted: 4 MiB have a million lists,
which takes most of a second."""


class Embeddings(msgspec.Struct, kw_only=True):
    """The body of /v1/embeddings."""

    input: msgspec.Raw
    """See `Inputs`."""
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int32 | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    priority: Priority | None = None
    # Refused
    truncate_prompt_tokens: int | None = None


class Document(msgspec.Struct, gc=False):
    """A document that has fields; only its text is read."""

    text: str


class Rerank(msgspec.Struct, kw_only=True):
    """The body of /v1/rerank."""

    query: str
    documents: list[str | Document]
    model: str = ""
    top_n: Int32 | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    priority: Priority | None = None
    # Refused
    rank_fields: list[str] | None = None
    max_chunks_per_doc: int | None = None
    max_tokens_per_doc: int | None = None
    truncate_prompt_tokens: int | None = None


class Score(msgspec.Struct, kw_only=True):
    """The body of /v1/score; one text is scored with each of the others, or pairs are."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str = ""
    instruction: str | None = None
    priority: Priority | None = None
    # Refused
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    truncate_prompt_tokens: int | None = None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "rank_fields": (None,),
    "max_chunks_per_doc": (None,),
    "max_tokens_per_query": (None, 0),
    "max_tokens_per_doc": (None, 0),
    "truncate_prompt_tokens": (None,),
}
"""Fields that are refused, and values that ask for nothing."""


# ---- answers -------------------------------------------------------------------------------------


class Usage(msgspec.Struct):
    """What was read."""

    prompt_tokens: int
    total_tokens: int


class Vector(msgspec.Struct):
    """One input's vector; base64 is of float32, little endian."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Vectors(msgspec.Struct):
    """The answer of /v1/embeddings."""

    data: list[Vector]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


class Ranked(msgspec.Struct, omit_defaults=True):
    """A document's score, 0 to 1; its text only if it was asked for."""

    index: int
    relevance_score: float
    document: Document | None = None


class Tokens(msgspec.Struct):
    """Counts of tokens, as Cohere says them."""

    input_tokens: int


class Meta(msgspec.Struct):
    """What an answer is billed by, as Cohere says it."""

    tokens: Tokens


class Ranking(msgspec.Struct):
    """The answer of /v1/rerank, the best first: Cohere's, with what Jina and vLLM add."""

    id: str
    results: list[Ranked]
    meta: Meta
    model: str
    usage: Usage


class Scored(msgspec.Struct):
    """A pair's score, 0 to 1."""

    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(msgspec.Struct):
    """The answer of /v1/score, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[Scored]
    usage: Usage
    object: Literal["list"] = "list"
