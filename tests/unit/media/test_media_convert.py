"""Media of a generation, and what workers say they take: to messages and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream.v1 import generation_pb2, media_pb2, worker_pb2
from millstream_server.control.engine import Role, WorkerDescription
from millstream_server.encode.encoder import EncoderInfo
from millstream_server.generation.generator import GeneratorInfo, MediaModel
from millstream_server.generation.output import Finish, FinishReason
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.wire import (
    finish_from_proto,
    start_from_proto,
    write_finish,
)
from millstream_server.media.items import (
    MAX_MEDIA_ITEMS,
    Content,
    EmbeddingTicket,
    Geometry,
    MediaInput,
    MediaLimits,
    Modality,
    Span,
)
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.worker_info import description_from_proto, description_to_proto
from tests.support.processor.generation_messages import start_to_proto

IMAGE = MediaInput(
    modality=Modality.IMAGE,
    spans=(Span(1, 4),),
    geometry=Geometry(grid=(1, 4, 4)),
    digest=bytes(range(32)),
    ticket=EmbeddingTicket(
        address="encode:1",
        lease="lease",
        tensor=TensorSpec(ElementType.BFLOAT16, (4, 64)),
        expires_at_ms=1_700_000_000_123,
        signature=b"s" * 32,
    ),
)
VIDEO = MediaInput(
    modality=Modality.VIDEO,
    spans=(Span(6, 2), Span(9, 2)),
    geometry=Geometry(grid=(2, 2, 4), seconds_per_step=0.5, timestamps_s=(0.25, 1.375)),
    digest=bytes(32),
    ticket=EmbeddingTicket(
        address="encode:1",
        lease="other",
        tensor=TensorSpec(ElementType.FLOAT32, (16, 1176)),
        content=Content.PIXELS,
    ),
    content=Content.PIXELS,
)
REQUEST = GenerationRequest(
    prompt=Prompt(list(range(20)), (IMAGE, VIDEO)), sampling=Sampling(max_new_tokens=4)
)
GENERATES = GeneratorInfo(
    engine="sglang",
    engine_version="0.5.23",
    max_running_requests=16,
    vocab_size=1000,
    context_length=500,
    block_size=1,
    total_blocks=8192,
    media=MediaModel(
        modalities=frozenset(Modality),
        family="qwen3_vl",
        embedding_width=256,
        takes_pixels=True,
    ),
)
ENCODES = EncoderInfo(
    engine="transformers",
    engine_version="5",
    max_running_requests=8,
    weight_version="7",
    modalities=frozenset({Modality.IMAGE}),
    max_item_tokens=4096,
    limits=MediaLimits(max_item_bytes=5, max_pixels=6, max_frames=7, max_video_s=8.5),
)


def test_media_of_a_start_survive() -> None:
    message = start_to_proto(3, REQUEST)
    read = start_from_proto(
        generation_pb2.StartGeneration.FromString(message.SerializeToString()), 100
    )
    assert read.prompt.media == (IMAGE, VIDEO)
    assert read.prompt.media_tokens == 8


def test_a_decode_worker_gets_geometry_alone() -> None:
    bare = replace(IMAGE, ticket=None)
    message = start_to_proto(3, replace(REQUEST, prompt=Prompt([1] * 8, (bare,))))
    assert not message.media[0].HasField("ticket")
    assert start_from_proto(message, 100).prompt.media == (bare,)


def test_a_text_request_has_no_media_field() -> None:
    message = start_to_proto(3, replace(REQUEST, prompt=Prompt([1])))
    assert "media" not in {field.name for field, _ in message.ListFields()}
    assert start_from_proto(message, 100).prompt.media == ()


def test_an_item_that_cannot_be_read_is_named() -> None:
    message = start_to_proto(3, REQUEST)
    message.media[1].modality = media_pb2.MODALITY_UNSPECIFIED
    with pytest.raises(InvalidRequestError, match=r"^media\[1\]\.modality: "):
        start_from_proto(message, 100)


def test_too_many_items_are_refused_before_they_are_read() -> None:
    message = generation_pb2.StartGeneration(token_ids=[1])
    for _ in range(MAX_MEDIA_ITEMS + 1):
        message.media.add()
    with pytest.raises(InvalidRequestError) as raised:
        start_from_proto(message, 100)
    (violation,) = raised.value.violations
    assert violation.field == "media"
    assert violation.description == "has 257 items; a prompt has at most 256"


def test_more_spans_than_tokens_are_refused_before_they_are_read() -> None:
    message = generation_pb2.StartGeneration(token_ids=[1])
    item = message.media.add()
    for _ in range(2):
        item.spans.add()
    with pytest.raises(InvalidRequestError) as raised:
        start_from_proto(message, 100)
    (violation,) = raised.value.violations
    assert violation.field == "media"
    assert violation.description == "has 2 spans; a prompt of 1 tokens has fewer"


@pytest.mark.parametrize("media_tokens", [0, 8])
def test_media_tokens_of_a_finish_survive(media_tokens: int) -> None:
    finish = Finish(
        reason=FinishReason.LENGTH,
        prompt_tokens=20,
        completion_tokens=4,
        media_tokens=media_tokens,
    )
    message = generation_pb2.SlotFinish(slot=1)
    write_finish(message, finish)
    assert message.usage.media_tokens == media_tokens
    assert finish_from_proto(message) == finish


DESCRIPTIONS = {
    "generates": WorkerDescription(
        role=Role.PREFILL, model="m", engine=GENERATES, batched_controls=True
    ),
    "generates text alone": WorkerDescription(
        role=Role.DECODE, model="m", engine=replace(GENERATES, media=None), batched_controls=True
    ),
    "encodes": WorkerDescription(role=Role.ENCODE, model="m", engine=ENCODES, encoder=ENCODES),
    "does both": WorkerDescription(
        role=Role.AGGREGATED,
        model="m",
        engine=GENERATES,
        encoder=replace(
            ENCODES,
            content=Content.PIXELS,
            engine=GENERATES.engine,
            engine_version=GENERATES.engine_version,
            max_running_requests=GENERATES.max_running_requests,
            weight_version=GENERATES.weight_version,
        ),
        batched_controls=True,
    ),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_survives(name: str) -> None:
    description = DESCRIPTIONS[name]
    info = worker_pb2.WorkerInfo.FromString(description_to_proto(description).SerializeToString())
    assert description_from_proto(info) == description


def test_an_encode_worker_is_described_by_its_engine_alone() -> None:
    described = replace(DESCRIPTIONS["encodes"], encoder=None)
    assert description_from_proto(description_to_proto(described)).encoder == ENCODES


def _clear_modalities(info: Any) -> None:
    del info.encoder.modalities[:]


def _unset_content(info: Any) -> None:
    info.encoder.content = media_pb2.EMBEDDING_CONTENT_UNSPECIFIED


def _unset_encoder(info: Any) -> None:
    info.ClearField("encoder")


@pytest.mark.parametrize("change", [_clear_modalities, _unset_content, _unset_encoder])
def test_an_encode_worker_must_say_what_it_encodes(change: Any) -> None:
    info = description_to_proto(DESCRIPTIONS["encodes"])
    change(info)
    with pytest.raises(ValueError, match="doesn't say what"):
        description_from_proto(info)


def test_newer_modalities_are_left_out() -> None:
    info = description_to_proto(DESCRIPTIONS["does both"])
    info.media_model.modalities.append(77)  # type: ignore[arg-type]
    info.encoder.modalities.append(77)  # type: ignore[arg-type]
    assert description_from_proto(info) == DESCRIPTIONS["does both"]
    del info.media_model.modalities[:-1]
    engine = description_from_proto(info).engine
    assert isinstance(engine, GeneratorInfo)
    assert engine.media is None
