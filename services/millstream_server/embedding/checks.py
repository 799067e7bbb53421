"""What a request must satisfy before an engine gets it; also used where it is tokenized.

Fields are named as in embedding.proto: `inputs[3].token_ids`, `dimensions`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import islice

from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.embedding.request import (
    MAX_DOCUMENTS,
    MAX_INPUTS,
    EmbedRequest,
    RerankRequest,
)
from millstream_server.runtime.errors import (
    FieldViolation,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.request_id import short_text_violations

_MAX_VIOLATIONS = 8
"""A batch of 2,048 bad inputs gets an error of a readable size."""
_SEND_IDS = "a worker takes no text: send token ids, or send the text to a Processor"
_NONE: frozenset[int] = frozenset()


def check_embed(
    request: EmbedRequest, info: EmbedderInfo, *, texts: Container[int] = _NONE
) -> None:
    """Check a batch of token ids; those at the indices ``texts`` were made of text.

    Raises:
        InvalidRequestError: it isn't one that the engine takes.
    """
    if not info.embeds:
        raise UnsupportedFeatureError(
            "the model ranks documents and makes no vectors: call Rerank, or name another model"
        )
    _raise(_embed_problems(request, info, texts))
    if info.normalizes and not request.normalize:
        raise UnsupportedFeatureError.of(
            "normalize",
            f"is false, and the vectors that {info.engine} makes with this model always have the "
            "length 1; leave it out, or serve the model with --engine transformers",
        )


def check_rerank(
    request: RerankRequest, info: EmbedderInfo, *, texts: Container[int] = _NONE
) -> None:
    """Check pairs of token ids; those at the indices ``texts`` were made of text.

    Raises:
        InvalidRequestError: it isn't one that the engine takes.
    """
    if not info.ranks:
        raise UnsupportedFeatureError(
            "the model makes vectors and ranks no documents: call Embed, or name another model"
        )
    _raise(_rerank_problems(request, info, texts))


def check_dimensions(dimensions: int | None, info: EmbedderInfo) -> Iterator[FieldViolation]:
    """Yield why vectors can't be cut to so many numbers."""
    if dimensions is not None and dimensions not in (*info.dimensions, info.width):
        can = _readable((*info.dimensions, info.width))
        yield FieldViolation("dimensions", f"is {dimensions}; this model's vectors have {can}")


def _raise(problems: Iterator[FieldViolation]) -> None:
    if found := list(islice(problems, _MAX_VIOLATIONS)):
        raise InvalidRequestError.of_all(found)


def _embed_problems(
    request: EmbedRequest, info: EmbedderInfo, texts: Container[int]
) -> Iterator[FieldViolation]:
    yield from short_text_violations(request.request_id)
    yield from check_dimensions(request.dimensions, info)
    if request.prompt_name:
        yield FieldViolation("prompt_name", _SEND_IDS)
    count = len(request.inputs)
    if not 1 <= count <= MAX_INPUTS:
        yield FieldViolation("inputs", f"has {count}; send 1 to {MAX_INPUTS}")
        return
    for index, ids in enumerate(request.inputs):
        if isinstance(ids, str):
            yield FieldViolation(f"inputs[{index}].text", _SEND_IDS)
        elif problem := _ids_problem(ids, info):
            form = "text" if index in texts else "token_ids"
            yield FieldViolation(f"inputs[{index}].{form}", problem)


def _rerank_problems(
    request: RerankRequest, info: EmbedderInfo, texts: Container[int]
) -> Iterator[FieldViolation]:
    yield from short_text_violations(request.request_id)
    if request.top_n is not None and request.top_n < 1:
        yield FieldViolation("top_n", f"is {request.top_n}; it must be at least 1")
    if not texts:
        yield from _worker_problems(request)
    count = len(request.pairs)
    if not 1 <= count <= MAX_DOCUMENTS:
        field = "documents" if texts else "pairs"
        yield FieldViolation(field, f"has {count}; send 1 to {MAX_DOCUMENTS}")
        return
    for index, ids in enumerate(request.pairs):
        if problem := _ids_problem(ids, info):
            form = "documents" if index in texts else "pairs"
            yield FieldViolation(f"{form}[{index}]", problem)


def _worker_problems(request: RerankRequest) -> Iterator[FieldViolation]:
    """Yield what needs text, in a request that has token ids only."""
    texts = (
        ("query", request.query),
        ("documents", request.documents),
        ("instruction", request.instruction),
    )
    for field, given in texts:
        if given:
            yield FieldViolation(field, _SEND_IDS)
    if request.return_documents:
        yield FieldViolation("return_documents", "needs `documents`: pairs have no text")


def _ids_problem(ids: Sequence[int], info: EmbedderInfo) -> str | None:
    if not ids:
        return "is empty: it needs at least one token"
    if len(ids) > info.max_input_tokens:
        return f"has {len(ids)} tokens; this model takes at most {info.max_input_tokens}"
    if max(ids) >= info.vocab_size or min(ids) < 0:
        wrong = next(i for i in ids if not 0 <= i < info.vocab_size)
        return f"has the token id {wrong}; this model's are below {info.vocab_size}"
    return None


def _readable(numbers: Sequence[int]) -> str:
    found = sorted(set(numbers))
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:  # noqa: PLR2004 - all between
        return f"{found[0]} to {found[-1]}"
    return " or ".join(map(str, found))
