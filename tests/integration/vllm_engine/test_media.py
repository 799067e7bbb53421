"""Images and videos in a real engine: the answers are transformers' own, token for token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import Sampling
from millstream_server.media.items import Content, Modality
from tests.support.engines.vllm_engines import Started, result, started, started_pair
from tests.support.media.reference_media import Case, make_case
from tests.support.models.vision_models import clip, make_vision_model, picture, widen_heads

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def vision() -> Path:
    """The demo model: its heads are wide enough for vLLM's attention on a CPU."""
    return Path(__file__).parents[3] / "demo" / "vision" / "model"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seeing(vision: Path) -> AsyncIterator[Started]:
    async with started(vision, max_running_requests=4) as engine:
        yield engine


def _request(case: Case) -> GenerationRequest:
    sampling = Sampling(max_new_tokens=len(case.token_ids), temperature=0.0, ignore_eos=True)
    return GenerationRequest(prompt=case.prompt, sampling=sampling)


def _images(vision: Path, *seeds: int, content: Content = Content.ROWS) -> Case:
    text = "look " + " and ".join(f"{_IMAGE} here" for _ in seeds) + " so what"
    files = [picture(64 + 32 * (seed % 3), 64, seed=seed) for seed in seeds]
    return make_case(vision, text, files, content=content)


async def test_what_it_takes(seeing: Started) -> None:
    assert seeing.info.media is not None
    assert seeing.info.media.modalities == frozenset(Modality)
    assert seeing.info.media.takes_pixels


@pytest.mark.parametrize("content", list(Content))
async def test_images(seeing: Started, vision: Path, content: Content) -> None:
    for seeds in ((0,), (1, 2), (3, 4, 5)):
        case = _images(vision, *seeds, content=content)
        sink = await seeing.answer(_request(case))
        case.check(sink.token_ids)
        again = seeing.submit(_request(case))
        assert (await result(again)).cached_tokens >= 32 * (len(case.prompt) > 33)
        case.check(again.token_ids)


async def test_equal_placeholders_of_other_pictures_share_nothing(
    seeing: Started, vision: Path
) -> None:
    first, second = (_images(vision, seed) for seed in (10, 13))
    assert first.prompt.token_ids == second.prompt.token_ids
    assert first.token_ids != second.token_ids
    for case in (first, second, first):
        case.check((await seeing.answer(_request(case))).token_ids)


@pytest.mark.parametrize("content", list(Content))
async def test_videos(seeing: Started, vision: Path, content: Content) -> None:
    asked = [
        (f"watch {_VIDEO} closely and say", [], [clip(4, 64, 64, fps=4.0, seed=20)]),
        (f"{_IMAGE} then {_VIDEO} end", [picture(96, 64)], [clip(5, 96, 64, fps=3.0, seed=1)]),
    ]
    for text, images, videos in asked:
        case = make_case(vision, text, images, videos, content=content)
        case.check((await seeing.answer(_request(case))).token_ids)


async def test_images_at_prefill_and_their_geometry_at_decode(vision: Path) -> None:
    async with started_pair(vision, max_running_requests=4) as pair:
        for seeds in ((0,), (1, 2)):
            case = _images(vision, *seeds)
            got, first, last = await pair.hand_off(_request(case), at_decode=case.at_decode)
            case.check(got)
            assert first.media_tokens == last.media_tokens > 0


async def test_images_of_qwen3_vl(tmp_path: Path) -> None:
    """Its rows have a part for each of the first layers; its videos are refused by name."""
    model = widen_heads(make_vision_model(tmp_path, "qwen3_vl"))
    async with started(model, max_running_requests=4) as engine:
        assert engine.info.media is not None
        assert engine.info.media.modalities == {Modality.IMAGE}
        for content in Content:
            case = _images(model, 1, 2, content=content)
            case.check((await engine.answer(_request(case))).token_ids)
