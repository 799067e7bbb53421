"""What a Processor puts around texts: prompts of embedders, forms and instructions of rerankers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import embedding_pb2, worker_pb2
from millstream_server.embedding.model_files import ModelUse
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import processor
from tests.support.models.models import byte_level_model, sentencepiece_model
from tests.support.processor.played_forwarding import PlayedEmbedder, batch, played, slots
from tests.support.wire.failures import refusal

ANSWERING = worker_pb2.EmbeddingModelInfo(ranks=True, answers=True, max_input_tokens=2000)
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{# 'query' 'document' #}!"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(byte_level_model(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder: Path = tmp_path_factory.mktemp("template")
    return TextModel.load(byte_level_model(folder, tokenizer_config={"chat_template": TEMPLATE}))


@pytest.mark.parametrize(
    ("named", "put"),
    [({}, "find: "), ({"prompt_name": "document"}, "text: "), ({"prompt_name": ""}, "")],
)
async def test_a_prompt_is_put_in_front_of_texts_not_of_ids(
    plain: TextModel, named: dict[str, Any], put: str
) -> None:
    prompts = {"query": "find: ", "document": "text: "}
    text = replace(plain, use=ModelUse(prompts=prompts, default_prompt="query"))
    worker = PlayedEmbedder(vocab_size=text.vocab_size)
    worker.info.embedding_model.max_input_tokens = 100
    async with (
        played(worker) as address,
        processor({"embedder": text}, [address]) as front,
        slots(front.embedding.Embed()) as client,
    ):
        await client.send(batch(0, "a cat", [5, 6], **named))
        await client.end_of(0)
        await client.send(batch(1, "a cat", prompt_name="passage"))
        (wrong,) = (await client.error_of(1)).violations
    sent = [list(part.token_ids.ids) for part in worker.starts[0].inputs]
    assert sent == [text.encode(put + "a cat", add_special_tokens=True), [5, 6]]
    assert not worker.starts[0].HasField("prompt_name")
    assert (wrong.field, "query, document" in wrong.description) == ("prompt_name", True)


async def rerank(text: TextModel, info: worker_pb2.EmbeddingModelInfo, **request: Any) -> Any:
    """Return the token ids of the only pair that a worker got, or how the request was refused."""
    worker = PlayedEmbedder("ranker", info, vocab_size=text.vocab_size)
    async with played(worker) as address, processor({"ranker": text}, [address]) as front:
        call = front.embedding.Rerank(
            embedding_pb2.RerankRequest(query="why", documents=["so"], **request)
        )
        if await call.code() is not grpc.StatusCode.OK:
            return await refusal(call)
    assert not worker.reranks[0].HasField("instruction")
    return list(worker.reranks[0].pairs[0].ids)


@pytest.mark.parametrize("given", [None, "Prefer short ones"])
async def test_a_model_that_answers_reads_qwen3_reranker_s_form(
    plain: TextModel, given: str | None
) -> None:
    ids = await rerank(plain, ANSWERING, instruction=given)
    asked = given or "Given a web search query, retrieve relevant passages that answer the query"
    said = plain.decode(ids, skip_special_tokens=False)
    assert said.endswith(
        f"<|im_start|>user\n<Instruct>: {asked}\n<Query>: why\n<Document>: so<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert ids[0] == plain.tokenizer.token_to_id("<|im_start|>")


async def test_a_template_for_pairs_gets_the_instruction(with_template: TextModel) -> None:
    text = replace(with_template, use=ModelUse(prompts={"web": "Find"}, default_prompt="web"))
    for info in (ANSWERING, worker_pb2.EmbeddingModelInfo(ranks=True, max_input_tokens=2000)):
        made = [await rerank(text, info, **given) for given in ({}, {"instruction": ""})]
        said = [text.decode(ids, skip_special_tokens=False) for ids in made]
        assert said == ["<system>Find<query>why<document>so!", "<query>why<document>so!"]


@pytest.mark.parametrize(
    ("info", "request_", "field"),
    [
        (
            worker_pb2.EmbeddingModelInfo(ranks=True, max_input_tokens=99),
            {"instruction": "x"},
            "instruction",
        ),
        (ANSWERING, {"instruction": "x" * 4097}, "instruction"),
    ],
)
async def test_an_instruction_that_no_model_reads_is_refused(
    plain: TextModel, info: worker_pb2.EmbeddingModelInfo, request_: dict[str, Any], field: str
) -> None:
    assert (await rerank(plain, info, **request_)).fields == (field,)


async def test_a_form_that_is_not_known_is_refused(tmp_path: Path) -> None:
    other = TextModel.load(sentencepiece_model(tmp_path))
    assert (await rerank(other, ANSWERING)).fields == ("documents",)
