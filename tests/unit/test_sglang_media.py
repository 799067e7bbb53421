"""What SGLang is given of images and videos: exactly one dict per modality."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import struct
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.sglang.config import (
    SglangEngineConfig,
    engine_arguments,
    engine_environment,
)
from millstream_server.engines.sglang.describe import with_media_model
from millstream_server.engines.sglang.engine import SglangEngine
from millstream_server.engines.sglang.requests import runs
from millstream_server.engines.sglang.requests.media import media_arguments
from millstream_server.engines.sglang.requests.translate import generate_arguments
from millstream_server.generation.output import CollectingSink, FinishReason
from millstream_server.generation.request import GenerationRequest
from millstream_server.media.items import Content, Geometry, MediaInput, Modality, cache_key
from millstream_server.media.tensor import ElementType, Tensor, TensorSpec
from millstream_server.runtime.errors import InternalError, InvalidRequestError
from millstream_testing.waiting import until
from tests.support.media.media_requests import WIDTH, fetched, geometry_only, item, request
from tests.support.models.vision_models import FamilyName, make_vision_model

IMAGES = fetched(request(item("a", 2), item("b", 8)))
BOTH = fetched(
    request(
        item("a", 2),
        item("v", 6, modality=Modality.VIDEO, seconds_per_step=0.5),
        item("b", 10),
        item("w", 14, modality=Modality.VIDEO, seconds_per_step=0.25),
    )
)


def _arguments(asked: GenerationRequest, role: Role = Role.AGGREGATED) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return dict(media_arguments(asked.prompt.media, role))


def _values(media: list[MediaInput]) -> list[bytes]:
    return [bytes(one.tensor.data) for one in media if one.tensor]


def test_several_images_are_one_dict() -> None:
    (name, (bundle,)), *others = _arguments(IMAGES).items()
    assert (name, others) == ("image_data", [])
    assert set(bundle) == {
        "format", "modality", "hash", "offsets", "precomputed_embeddings", "image_grid_thw"
    }  # fmt: skip
    assert (bundle["format"], bundle["modality"]) == ("processor_output", "image")
    assert bundle["hash"] == cache_key(IMAGES.prompt.media)
    assert bundle["offsets"] == [(2, 3), (8, 9)], "both ends belong to it"
    assert bundle["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 4]]
    rows = bundle["precomputed_embeddings"]
    assert tuple(rows.shape) == (4, WIDTH)
    assert rows.numpy().tobytes() == b"".join(_values(list(IMAGES.prompt.media)))


def test_a_single_tensor_is_not_copied() -> None:
    asked = fetched(request(item("a", 2)))
    (bundle,) = _arguments(asked)["image_data"]
    tensor = asked.prompt.media[0].tensor
    assert tensor is not None
    tensor.data.cast("B")[:4] = b"\x00\x00\x80\x3f"
    assert bundle["precomputed_embeddings"][0, 0].item() == 1.0


def test_read_only_bytes_are_copied_without_a_warning() -> None:
    asked = fetched(request(item("a", 2)))
    one = asked.prompt.media[0]
    assert one.tensor is not None
    frozen = Tensor(one.tensor.spec, memoryview(bytes(one.tensor.data)))
    media = (dataclasses.replace(one, tensor=frozen),)
    asked = dataclasses.replace(asked, prompt=dataclasses.replace(asked.prompt, media=media))
    (bundle,) = _arguments(asked)["image_data"]
    assert bundle["precomputed_embeddings"].numpy().tobytes() == bytes(frozen.data)


@pytest.mark.parametrize("kind", ElementType)
def test_element_types(kind: ElementType) -> None:
    spec = TensorSpec(kind, (2, WIDTH))
    data = memoryview(bytearray(spec.nbytes))
    one = dataclasses.replace(item("a", 2), tensor=Tensor(spec, data))
    asked = request(one)
    (bundle,) = _arguments(asked)["image_data"]
    assert str(bundle["precomputed_embeddings"].dtype) == f"torch.{kind.value}"


def test_images_and_videos_are_a_dict_each_and_both_have_the_timing() -> None:
    arguments = _arguments(BOTH)
    assert set(arguments) == {"image_data", "video_data"}
    (images,), (videos,) = arguments["image_data"], arguments["video_data"]
    assert (images["modality"], videos["modality"]) == ("image", "video")
    assert images["offsets"] == [(2, 3), (10, 11)]
    assert videos["offsets"] == [(6, 7), (14, 15)]
    assert images["hash"] != videos["hash"]
    for bundle in (images, videos):
        assert bundle["second_per_grid_ts"].tolist() == [0.5, 0.25]
    assert "video_grid_thw" in videos
    assert "video_grid_thw" not in images


@pytest.mark.parametrize(
    ("modality", "name"),
    [(Modality.IMAGE, "pixel_values"), (Modality.VIDEO, "pixel_values_videos")],
)
def test_pixels_go_where_pixels_belong(modality: Modality, name: str) -> None:
    asked = fetched(request(item("a", 2, modality=modality, content=Content.PIXELS)))
    (bundle,) = _arguments(asked)[f"{modality.value}_data"]
    assert tuple(bundle[name].shape) == (8, 12)
    assert "precomputed_embeddings" not in bundle


def test_decode_gets_geometry_zeros_and_the_hash() -> None:
    (bundle,) = _arguments(geometry_only(IMAGES), Role.DECODE)["image_data"]
    assert tuple(bundle["precomputed_embeddings"].shape) == (4, 1)
    assert not bundle["precomputed_embeddings"].any()
    assert bundle["hash"] == cache_key(geometry_only(IMAGES).prompt.media)
    assert bundle["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 4]]
    (other,) = _arguments(geometry_only(request(item("c", 2), item("b", 8))), Role.DECODE)[
        "image_data"
    ]
    assert other["hash"] != bundle["hash"], "equal zeros of other pictures share no cache entry"


def test_a_family_without_a_grid_has_none() -> None:
    one = dataclasses.replace(IMAGES.prompt.media[0], geometry=Geometry())
    only: Any = media_arguments((one,), Role.AGGREGATED)["image_data"]
    assert "image_grid_thw" not in only[0]


def test_media_that_was_not_fetched_never_reaches_the_engine() -> None:
    with pytest.raises(InternalError):
        media_arguments(request(item("a", 2)).prompt.media, Role.PREFILL)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("content", Content)
def test_numbers_that_are_not_finite_never_reach_the_engine(
    number: float, content: Content
) -> None:
    asked = fetched(request(item("a", 2, content=content), item("b", 8, content=content)))
    tensor = asked.prompt.media[1].tensor
    assert tensor is not None
    struct.pack_into("<f", tensor.data, 8, number)
    with pytest.raises(InvalidRequestError, match=r"^media: a number of the image tensors"):
        _arguments(asked)


def test_the_rest_of_a_request_is_as_with_text() -> None:
    sampling = dataclasses.replace(IMAGES.sampling, seed=7)
    asked = dataclasses.replace(IMAGES, sampling=sampling)
    text = dataclasses.replace(asked, prompt=dataclasses.replace(asked.prompt, media=()))
    arguments: Any = generate_arguments(asked, Role.AGGREGATED)
    assert arguments == generate_arguments(text, Role.AGGREGATED)
    assert arguments["sampling_params"]["sampling_seed"] == 7


# ---- how the engine is started ------------------------------------------------------------------


_KNOWN = {
    "model_path", "device", "dtype", "log_level", "skip_tokenizer_init", "host",
    "incremental_streaming_output", "disaggregation_mode", "enable_metrics", "attention_backend",
    "sampling_backend", "disable_cuda_graph", "sleep_on_idle", "max_total_tokens",
    "max_running_requests", "disaggregation_transfer_backend",
    "disaggregation_decode_retraction_backup", "enable_multimodal",
    "enable_adaptive_dispatch_to_encoder", "mm_attention_backend",
}  # fmt: skip


def _start(path: Path, **changes: Any) -> tuple[dict[str, object], Any]:
    config = SglangEngineConfig(**{"model_path": str(path), "device": "cpu", **changes})
    config, media = with_media_model(config)
    text_only = engine_arguments(dataclasses.replace(config, multimodal=None), _KNOWN)
    arguments = engine_arguments(config, _KNOWN)
    return {name: value for name, value in arguments.items() if name not in text_only}, media


@pytest.mark.parametrize(
    ("family", "pixel_shape", "positions"),
    [
        ("qwen2_5_vl", (1176,), 2.0),
        ("qwen3_vl", (1536,), 0.0),
        ("gemma3", (3, 56, 56), 0.0),
    ],
)
def test_a_model_with_a_vision_tower(
    tmp_path: Path, family: FamilyName, pixel_shape: tuple[int, ...], positions: float
) -> None:
    make_vision_model(tmp_path, family)
    arguments, media = _start(tmp_path)
    assert arguments == {
        "enable_multimodal": True,
        "enable_adaptive_dispatch_to_encoder": True,
        "mm_attention_backend": "sdpa",
    }
    assert (media.family, media.pixel_shape) == (family, pixel_shape)
    assert media.positions_per_second == positions
    assert media.takes_pixels
    on_gpu, _ = _start(tmp_path, device="cuda")
    assert "mm_attention_backend" not in on_gpu
    config, _ = with_media_model(SglangEngineConfig(model_path=str(tmp_path)))
    assert engine_environment(config) == {"SGLANG_SANITIZE_NAN_LOGITS": "1"}
    _, at_decode = _start(tmp_path, role=Role.DECODE)
    assert not at_decode.takes_pixels


def test_a_text_model_is_started_as_before(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert _start(tmp_path) == ({}, None)


def test_a_vision_model_of_an_unknown_family_serves_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    assert _start(tmp_path) == ({"enable_multimodal": False}, None)


# ---- a request whose media are being put together -----------------------------------------------


async def test_a_cancel_while_media_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang doesn't know the request yet, so there is nothing to abort there."""
    at_work, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> dict[str, object]:
        at_work.set()
        assert go_on.wait(10)
        return {}

    monkeypatch.setattr(runs, "media_arguments", slow)
    monkeypatch.setattr(runs, "BatchReader", lambda *_: None)  # it wants a real engine
    built: Any = SimpleNamespace(
        fake_bootstrap_host="", engine=SimpleNamespace(tokenizer_manager=None)
    )
    adapter = SglangEngine(SglangEngineConfig(model_path="m"))
    monkeypatch.setattr(adapter._lifetime, "ready", lambda: (built, None))
    adapter._runs.start(built)
    sink = CollectingSink()
    adapter.submit(IMAGES, sink)
    await until(at_work.is_set)
    adapter.abort(IMAGES.engine_id)
    finish = await asyncio.wait_for(sink.result(), 5)
    assert (finish.reason, finish.media_tokens) == (FinishReason.CANCELLED, 4)
    assert not adapter._runs
    go_on.set()
