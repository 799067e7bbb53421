"""What every encoder must do, as functions that raise.

A process runs one SGLang model at most, so a job checks one encoder of one model and prints the
result of every check as JSON: `python -m tests.support.engines.encoder_checks MODEL FAMILY TOWER`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from millstream_server.control.engine import EngineLoad, Role
from millstream_server.encode.encoder import EncoderInfo, MediaEncoder
from millstream_server.encode.worker.app import EncodeSettings
from millstream_server.engines.adapter import EncoderSettings
from millstream_server.engines.registry import AUTO, ENCODERS, encoder_for
from millstream_server.engines.sglang import tower as sglang_tower
from millstream_server.engines.transformers.encoder import TowerEncoder
from millstream_server.engines.transformers.tower import NoTower, TowerConfig
from millstream_server.media import families
from millstream_server.media.decoding.sampling import sample
from millstream_server.media.families.placing import place
from millstream_server.media.items import Content, Frames, Modality
from millstream_server.media.tensor import ElementType, Tensor
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    InvalidRequestError,
)
from tests.support.models.vision_models import FamilyName, clip, picture, reference_model

PIXELS = "pixels"
STOCK_SGLANG = "stock-sglang"
"""SGLang's tower without what `engines.sglang.tower` works around."""
TOLERANCE = 2e-5
_MAX_ITEM_TOKENS = 150
_GROWTH_BYTES = 10 << 20

_IMAGES = (
    picture(64, 64, seed=1),
    picture(170, 100, seed=2),
    picture(224, 224, seed=3),  # several attention windows
    picture(8, 8, seed=4),
)
_CLIPS = (clip(4, 64, 64, seed=1), clip(5, 100, 80, seed=2, fps=23.976), clip(2, 64, 64, seed=3))


@dataclass(frozen=True)
class Started:
    """An encoder that has started, and what transformers says of the same model."""

    encoder: MediaEncoder
    info: EncoderInfo
    family: FamilyName
    directory: Path

    def truth(self, frames: Frames) -> np.ndarray:
        """Return the rows that transformers makes of an item, or the pixels."""
        import torch  # noqa: PLC0415 - an encoder's test has it anyway

        reference = reference_model(self.directory)
        image = frames.modality is Modality.IMAGE
        inputs = reference.inputs(
            self._placeholder(frames.modality),
            [frames] if image else [],
            [] if image else [frames],
        )
        name = "pixel_values" if image else "pixel_values_videos"
        if self.info.content is Content.PIXELS:
            return np.asarray(inputs[name])
        model = reference.model.model
        run = model.get_image_features if image else model.get_video_features
        grid = inputs.get("image_grid_thw" if image else "video_grid_thw")
        with torch.inference_mode():
            made = run(inputs[name], *([] if grid is None else [grid]))
        levels = [level[0] for level in getattr(made, "deepstack_features", None) or ()]
        return np.asarray(torch.cat([made.pooler_output[0], *levels], dim=1))

    def _placeholder(self, modality: Modality) -> str:
        family = families.load(self.directory)
        assert family is not None
        return family.placeholder(modality)


def array(tensor: Tensor) -> np.ndarray:
    """Read a float32 tensor."""
    assert tensor.spec.element_type is ElementType.FLOAT32
    assert len(tensor.data) == tensor.spec.nbytes
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.spec.shape)


def _equal_to_transformers(started: Started, items: Sequence[Frames]) -> None:
    prepared = [started.encoder.prepare(frames) for frames in items]
    together = started.encoder.encode(prepared)
    for frames, one, tensor in zip(items, prepared, together, strict=True):
        made = array(tensor)
        np.testing.assert_allclose(made, started.truth(frames), atol=TOLERANCE, rtol=1e-5)
        (alone,) = started.encoder.encode([one])
        np.testing.assert_allclose(array(alone), made, atol=TOLERANCE, rtol=1e-5)


async def images(started: Started) -> None:
    _equal_to_transformers(started, _IMAGES)


async def videos(started: Started) -> None:
    if Modality.VIDEO in started.info.modalities:
        _equal_to_transformers(started, _CLIPS)


async def places(started: Started) -> None:
    """Tokens and geometry give the prompt that the model's own processor makes."""
    family = families.load(started.directory)
    assert family is not None
    items = [*_IMAGES, *(_CLIPS if Modality.VIDEO in family.modalities else ())]
    text = "a" + "\n".join(family.placeholder(frames.modality) for frames in items) + "b"
    reference = reference_model(started.directory)
    inputs = reference.inputs(
        text,
        [frames for frames in items if frames.modality is Modality.IMAGE],
        [frames for frames in items if frames.modality is Modality.VIDEO],
    )
    prepared = [started.encoder.prepare(frames) for frames in items]
    tokenizer: Any = reference.processor.tokenizer
    token_ids, _ = place(text, family, prepared, tokenizer.encode, "text")
    assert token_ids == inputs["input_ids"][0].tolist()
    seconds = inputs.get("second_per_grid_ts")
    if seconds is not None:
        made = [one.geometry.seconds_per_step for one in prepared if one.geometry.seconds_per_step]
        np.testing.assert_allclose(made, seconds, rtol=1e-6)


async def bad_items(started: Started) -> None:
    """A bad item fails in `prepare`, alone."""
    narrow = picture(402, 2)
    large = clip(60, 100, 100) if started.family == "qwen2_5_vl" else clip(40, 180, 180)
    sentences = {"402 x 2 pixels: one side is more than 200 times the other": narrow}
    if started.family == "gemma3":
        sentences["the model reads no videos"] = large
    else:
        sentences["the video's frames have no times"] = clip(fps=0.0)
        sentences[f"tokens, at most {_MAX_ITEM_TOKENS} are allowed"] = large
    if started.family == "qwen3_vl":
        sentences["the video has 1 frames; the model needs at least 2"] = clip(1)
    for sentence, frames in sentences.items():
        with pytest.raises(InvalidRequestError) as caught:
            started.encoder.prepare(frames)
        (violation,) = caught.value.violations
        assert violation.field == "data"
        assert sentence in violation.description
    assert len(started.encoder.encode([started.encoder.prepare(_IMAGES[0])])) == 1


async def batches(started: Started) -> None:
    """None is fine; images and videos don't mix."""
    assert started.encoder.encode([]) == []
    if Modality.VIDEO in started.info.modalities:
        mixed = [started.encoder.prepare(_IMAGES[0]), started.encoder.prepare(_CLIPS[0])]
        with pytest.raises(InternalError):
            started.encoder.encode(mixed)


async def threads(started: Started) -> None:
    """`prepare` may run in several threads at once."""
    wanted = [bytes(tensor.data) for tensor in _encoded(started, _IMAGES)]
    with ThreadPoolExecutor(4) as pool:
        prepared = list(pool.map(started.encoder.prepare, _IMAGES * 4))
    made = started.encoder.encode(prepared)
    for index, tensor in enumerate(made):
        before = np.frombuffer(wanted[index % len(_IMAGES)], np.float32)
        np.testing.assert_allclose(array(tensor).ravel(), before, atol=TOLERANCE, rtol=1e-5)


def _encoded(started: Started, items: Sequence[Frames]) -> list[Tensor]:
    return started.encoder.encode([started.encoder.prepare(frames) for frames in items])


async def probes(started: Started) -> None:
    await started.encoder.warm_up()
    before = started.encoder.progress(0)
    await asyncio.gather(started.encoder.probe(0), started.encoder.probe(0))
    assert started.encoder.progress(0) != before
    assert await started.encoder.load() == EngineLoad(
        running_requests=0, queued_requests=0, used_blocks=0, total_blocks=0
    )


async def memory(started: Started) -> None:
    """Fifty batches leave nothing behind."""
    _encoded(started, _IMAGES)
    before = _resident_bytes()
    for _ in range(50):
        _encoded(started, _IMAGES[:2])
    assert _resident_bytes() - before < _GROWTH_BYTES


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def info(started: Started) -> None:
    family = families.load(started.directory)
    assert family is not None
    assert started.info.modalities == family.modalities
    assert started.info.max_item_tokens == _MAX_ITEM_TOKENS
    assert len(started.info.settings_digest) == 32
    assert started.info.max_running_requests > 0


async def samples(started: Started) -> None:
    """The frames that it wants of a video are those that the model's processor takes."""
    from transformers.video_utils import VideoMetadata as video_metadata  # noqa: PLC0415, N813

    processor = getattr(reference_model(started.directory).processor, "video_processor", None)
    if processor is None:
        return
    for total, fps in ((8, 4.0), (61, 23.976), (300, 30.0), (901, 29.97)):
        metadata = video_metadata(total_num_frames=total, fps=fps)
        wanted = processor.sample_frames(metadata, fps=2.0)
        made = sample(started.info.sampling, total, fps, fps=2.0, max_frames=128)
        assert made == tuple(int(index) for index in wanted), (total, fps)


async def closing(started: Started) -> None:
    """It closes twice, and then fails what comes."""
    prepared = started.encoder.prepare(_IMAGES[0])
    await started.encoder.close()
    await started.encoder.close()
    with pytest.raises(EngineFailedError):
        started.encoder.encode([prepared])
    with pytest.raises(EngineFailedError):
        await started.encoder.probe(0)


async def traces(started: Started) -> None:
    """A closed encoder leaves the process as it was."""
    import torch  # noqa: PLC0415

    assert not torch.distributed.is_initialized(), started.info.engine
    assert not [name for name in os.environ if name.startswith("SGLANG_DISABLE")]


CHECKS: dict[str, Callable[[Started], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        images,
        videos,
        places,
        bad_items,
        batches,
        threads,
        probes,
        memory,
        info,
        samples,
    )
}
LAST_CHECKS: dict[str, Callable[[Started], Awaitable[None]]] = {
    check.__name__: check for check in (closing, traces)
}
NAMES = (*CHECKS, *LAST_CHECKS)


def _encoder(directory: Path, tower: str) -> MediaEncoder:
    if tower == PIXELS:
        config = TowerConfig(model_path=directory, device="cpu", max_item_tokens=_MAX_ITEM_TOKENS)
        return TowerEncoder(config, NoTower(config))
    settings = EncodeSettings(
        listen="",
        engine=encoder_for(directory) if tower == AUTO else tower,
        model_path=directory,
        common=EncoderSettings(device="cpu", max_item_tokens=_MAX_ITEM_TOKENS),
    )
    return ENCODERS.make(settings, Role.ENCODE)


async def run_all(directory: Path, family: FamilyName, tower: str) -> dict[str, str]:
    """Start one encoder, run every check, and return what failed: empty for success."""
    if tower == STOCK_SGLANG:  # in a process of its own
        mock.patch.object(sglang_tower, "steps_apart", lambda _family, grid: grid).start()
    encoder = _encoder(directory, "sglang" if tower == STOCK_SGLANG else tower)
    try:
        started = Started(encoder, await encoder.start(_failed), family, directory)
        return {
            name: await _outcome(check, started)
            for name, check in {**CHECKS, **LAST_CHECKS}.items()
        }
    finally:
        await encoder.close()


def _failed(error: object) -> None:
    raise AssertionError(error)


async def _outcome(check: Callable[[Started], Awaitable[None]], started: Started) -> str:
    try:
        await check(started)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the test shows it
        return traceback.format_exc()
    return ""


def main() -> None:
    # Everything else that prints goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    directory, family, tower = sys.argv[1:]
    outcomes = asyncio.run(run_all(Path(directory), family, tower))  # type: ignore[arg-type]
    json.dump(outcomes, out)
    out.flush()


if __name__ == "__main__":
    main()
