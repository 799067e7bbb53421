"""What is wrong with a request, by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_server.embedding.checks import check_embed, check_rerank
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.embedding.request import EmbedRequest, RerankRequest
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError

INFO = EmbedderInfo(
    engine="simulated",
    engine_version="1",
    max_running_requests=1,
    embeds=True,
    ranks=True,
    width=64,
    dimensions=(16, 32),
    max_input_tokens=5,
    vocab_size=100,
    max_batch_tokens=10,
)


def embed_problems(info: EmbedderInfo = INFO, *, texts: Any = (), **fields: Any) -> dict[str, str]:
    request = EmbedRequest(**({"inputs": [[1]]} | fields))
    with pytest.raises(InvalidRequestError) as caught:
        check_embed(request, info, texts=texts)
    return {found.field: found.description for found in caught.value.violations}


def rerank_problems(*, texts: Any = (), **fields: Any) -> dict[str, str]:
    request = RerankRequest(**({"pairs": [[1]]} | fields))
    with pytest.raises(InvalidRequestError) as caught:
        check_rerank(request, INFO, texts=texts)
    return {found.field: found.description for found in caught.value.violations}


@pytest.mark.parametrize(
    ("field", "sentence", "given"),
    [
        ("inputs", "has 0; send 1 to 2048", {"inputs": []}),
        ("inputs", "has 2049; send 1 to 2048", {"inputs": [[1]] * 2049}),
        ("inputs[1].token_ids", "is empty: it needs at least one token", {"inputs": [[1], []]}),
        (
            "inputs[1].token_ids",
            "has 6 tokens; this model takes at most 5",
            {"inputs": [[1], [1] * 6]},
        ),
        (
            "inputs[0].token_ids",
            "has the token id 100; this model's are below 100",
            {"inputs": [[99, 100]]},
        ),
        (
            "inputs[0].text",
            "a worker takes no text: send token ids, or send the text to a Processor",
            {"inputs": ["text"]},
        ),
        ("dimensions", "is 17; this model's vectors have 16 or 32 or 64", {"dimensions": 17}),
        ("dimensions", "is 0; this model's vectors have 16 or 32 or 64", {"dimensions": 0}),
        ("request_id", "has 130 bytes; at most 128 bytes are allowed", {"request_id": "é" * 65}),
        ("request_id", "must be printable", {"request_id": "a\nb"}),
    ],
)
def test_embed(field: str, sentence: str, given: dict[str, Any]) -> None:
    assert embed_problems(**given) == {field: sentence}


def test_what_is_right_passes() -> None:
    for dimensions in (None, 16, 64):
        check_embed(EmbedRequest(inputs=[[0, 99]] * 2048, dimensions=dimensions), INFO)
    check_embed(EmbedRequest(inputs=[[1] * 5]), replace(INFO, dimensions=()))
    check_rerank(RerankRequest(pairs=[[1] * 5], top_n=9, request_id="é" * 64), INFO)


def test_any_number_of_dimensions_is_told_shortly() -> None:
    info = replace(INFO, dimensions=tuple(range(1, 65)))
    assert embed_problems(info, dimensions=65) == {
        "dimensions": "is 65; this model's vectors have 1 to 64"
    }


def test_many_bad_inputs_make_a_short_error() -> None:
    assert len(embed_problems(inputs=[[]] * 2000)) == 8


def test_inputs_that_were_texts_are_named_so() -> None:
    problems = embed_problems(inputs=[[1] * 6, [1] * 6], texts={1})
    assert set(problems) == {"inputs[0].token_ids", "inputs[1].text"}
    assert set(rerank_problems(pairs=[[1], [1] * 6], texts={0, 1})) == {"documents[1]"}
    assert set(rerank_problems(pairs=[], texts={0})) == {"documents"}


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"pairs"}, {"pairs": []}),
        ({"pairs"}, {"pairs": [[1]] * 1025}),
        ({"pairs[1]"}, {"pairs": [[1], []]}),
        ({"top_n"}, {"top_n": 0}),
        ({"return_documents"}, {"return_documents": True}),
        ({"query", "documents"}, {"query": "a", "documents": ["b"]}),
        ({"request_id"}, {"request_id": "\0"}),
    ],
)
def test_rerank(fields: set[str], given: dict[str, Any]) -> None:
    assert set(rerank_problems(**given)) == fields


def test_a_model_of_the_other_kind_says_what_it_does() -> None:
    with pytest.raises(UnsupportedFeatureError, match="call Rerank"):
        check_embed(EmbedRequest(inputs=[[1]]), replace(INFO, embeds=False))
    with pytest.raises(UnsupportedFeatureError, match="call Embed"):
        check_rerank(RerankRequest(pairs=[[1]]), replace(INFO, ranks=False))


def test_vectors_of_another_length_are_refused_where_the_engine_makes_none() -> None:
    embed_request = EmbedRequest(inputs=[[1]], normalize=False)
    check_embed(embed_request, INFO)
    with pytest.raises(UnsupportedFeatureError) as caught:
        check_embed(embed_request, replace(INFO, normalizes=True))
    assert [v.field for v in caught.value.violations] == ["normalize"]


def test_a_worker_takes_neither_prompts_nor_instructions() -> None:
    assert list(embed_problems(prompt_name="query")) == ["prompt_name"]
    assert list(rerank_problems(instruction="x")) == ["instruction"]
