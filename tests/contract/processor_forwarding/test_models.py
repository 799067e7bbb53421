"""What each model does, and requests for models that do something else."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import embedding_pb2, processor_pb2, worker_pb2
from millstream_server.processor.models import ModelNames
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import MODEL, InProcessProcessor, processor, suite, worker
from millstream_testing.waiting import until
from tests.support.models.models import byte_level_model
from tests.support.processor.chats import chat, completion, start
from tests.support.processor.played_forwarding import (
    RANKING,
    PlayedDiffuser,
    PlayedEmbedder,
    batch,
    image,
    played,
    slots,
)
from tests.support.wire.failures import Failure, refusal


def _without_template(folder: Path) -> Path:
    return byte_level_model(folder, tokenizer_config={"chat_template": None})


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A tokenizer without a chat template, as embedding models have it."""
    return TextModel.load(_without_template(tmp_path_factory.mktemp("bare")))


@contextlib.asynccontextmanager
async def everything(
    text_model: TextModel, bare: TextModel, names: ModelNames | None = None
) -> AsyncIterator[tuple[InProcessProcessor, PlayedEmbedder]]:
    """One Processor for a chat model, and models for images, vectors and scores."""
    embedder, ranker = PlayedEmbedder(), PlayedEmbedder("ranker", RANKING)
    models = {MODEL: text_model, "drawing": None, "embedder": bare, "ranker": bare}
    async with (
        worker() as one,
        played(PlayedDiffuser()) as second,
        played(embedder) as third,
        played(ranker) as fourth,
        processor(models, [one.address, second, third, fourth], names=names) as front,
    ):
        yield front, embedder


async def test_each_model_says_what_it_does(text_model: TextModel, bare: TextModel) -> None:
    async with everything(text_model, bare) as (front, _):
        listed = await front.stub.ListModels(processor_pb2.ListModelsRequest())
        models = {model.name: model for model in listed.models}
        tasks = {
            name: [processor_pb2.ModelTask.Name(task)[11:] for task in model.tasks]
            for name, model in models.items()
        }
        assert tasks == {
            MODEL: ["CHAT", "COMPLETE"],
            "drawing": ["GENERATE_IMAGE"],
            "embedder": ["EMBED"],
            "ranker": ["RERANK"],
        }
        assert all(model.ready for model in listed.models)
        assert models["drawing"].diffusion.max_steps == 20
        assert list(models["drawing"].diffusion.schedulers) == ["euler", "ddim"]
        assert models["embedder"].embedding.width == 4
        assert [(w.role, w.connected) for w in models["ranker"].workers] == [
            (worker_pb2.WORKER_ROLE_EMBEDDING, 1)
        ]
        assert not models[MODEL].HasField("diffusion")
        assert not models["drawing"].chat


async def test_without_a_name_the_only_model_for_the_task_is_taken(
    text_model: TextModel, bare: TextModel
) -> None:
    async with everything(text_model, bare) as (front, embedder):
        assert (await chat(front.stub, "hi")).text
        async with slots(front.embedding.Embed()) as client:
            await client.send(batch(0, "a"))
            assert (await client.end_of(0)).model == "embedder"
        ranked = await front.embedding.Rerank(
            embedding_pb2.RerankRequest(query="q", documents=["a"])
        )
        assert ranked.model == "ranker"
        assert len(embedder.starts) == 1


async def _slot_failure(call: Any, message: Any) -> Failure:
    async with slots(call) as client:
        await client.send(message)
        error = await client.error_of(0)
        fields = tuple(violation.field for violation in error.violations)
        return Failure(grpc.StatusCode.INVALID_ARGUMENT, error.message, fields=fields)


async def test_a_model_that_does_something_else_says_what_and_names_one_that_can(
    text_model: TextModel, bare: TextModel
) -> None:
    async with everything(text_model, bare) as (front, _):
        rerank = embedding_pb2.RerankRequest(model="embedder", query="q", documents=["a"])
        complete = completion("a")
        complete.model = "drawing"
        failures = [
            (f"makes images; name one of {MODEL}", await refusal(front.stub.Complete(complete))),
            ("embeds texts; name one of ranker", await refusal(front.embedding.Rerank(rerank))),
            (
                "chats and continues texts; name one of embedder",
                await _slot_failure(front.embedding.Embed(), batch(0, "a", model=MODEL)),
            ),
            (
                "ranks documents; name one of drawing",
                await _slot_failure(front.diffusion.GenerateImage(), image(0, model="ranker")),
            ),
        ]
        for said, failure in failures:
            assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
            assert said in failure.message
            assert failure.fields == ("model",)


@pytest.mark.parametrize("model", ["embedder", "drawing"])
async def test_a_chat_with_such_a_model_is_refused_by_name(
    text_model: TextModel, bare: TextModel, model: str
) -> None:
    async with everything(text_model, bare) as (front, _):
        call = front.stub.Chat()
        await call.write(processor_pb2.ChatRequest(start=start("hi", model=model).start))
        failure = await refusal(call)
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.fields == ("start.model",)
        right = {"embedder": "embeds texts", "drawing": "makes images"}
        assert f"{right[model]}; name one of {MODEL}" in failure.message


async def test_what_no_model_here_does_is_said_so(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        failures = {
            "makes images": await _slot_failure(front.diffusion.GenerateImage(), image(0)),
            "embeds texts": await _slot_failure(front.embedding.Embed(), batch(0, "a")),
            "ranks documents": await refusal(
                front.embedding.Rerank(embedding_pb2.RerankRequest(query="q", documents=["a"]))
            ),
        }
        for does, failure in failures.items():
            assert failure.message == f"model: no model here {does}"
            assert failure.retry_delay_s is None


async def test_a_model_answers_to_its_alias_and_listmodels_says_who_is_asked_by_default(
    text_model: TextModel, bare: TextModel
) -> None:
    names = ModelNames(aliases={"gpt-4o": MODEL})
    async with everything(text_model, bare, names) as (front, _):
        answer = await chat(front.stub, "hi", model="gpt-4o")
        assert answer.started is not None
        assert answer.started.model == MODEL
        tokenized = processor_pb2.TokenizeRequest(model="gpt-4o", text="hi")
        assert (await front.stub.Tokenize(tokenized)).token_ids
        listed = await front.stub.ListModels(processor_pb2.ListModelsRequest())
        assert {model.name: list(model.aliases) for model in listed.models}[MODEL] == ["gpt-4o"]
        assert {
            model.name: [processor_pb2.ModelTask.Name(task)[11:] for task in model.default_of]
            for model in listed.models
        } == {
            MODEL: ["CHAT", "COMPLETE"],
            "drawing": ["GENERATE_IMAGE"],
            "embedder": ["EMBED"],
            "ranker": ["RERANK"],
        }


async def test_an_unknown_model_is_not_found(bare: TextModel) -> None:
    async with (
        processor({"embedder": bare}, [], wait=False) as front,
        slots(front.embedding.Embed()) as client,
    ):
        await client.send(batch(0, "a", model="other"))
        assert (await client.error_of(0)).code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_every_service_is_healthy_when_every_model_has_a_worker(bare: TextModel) -> None:
    async with (
        played(PlayedEmbedder()) as address,
        processor({"embedder": bare}, [address]) as front,
    ):
        stub: Any = health_pb2_grpc.HealthStub(front.channel)

        async def serving(service: str) -> bool:
            request = health_pb2.HealthCheckRequest(service=f"millstream.v1.{service}")
            status = (await stub.Check(request)).status
            return bool(status == health_pb2.HealthCheckResponse.SERVING)

        for service in ("ProcessorService", "DiffusionService", "EmbeddingService"):
            await until(partial(serving, service))
