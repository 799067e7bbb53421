"""Images and videos in real engines: the answers are transformers' own, token for token.

One aggregated engine per family, which takes embeddings and pixels, also in one batch.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import pytest
import pytest_asyncio

from millstream_server.control.engine import Role
from millstream_server.generation.output import CollectingSink, FinishReason
from millstream_server.generation.request import GenerationRequest, LogprobOptions
from millstream_server.generation.ticket import Ticket
from millstream_server.media.items import Content, Frames, Modality
from millstream_server.runtime.errors import InvalidRequestError
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_requests import (
    LONG,
    aborted,
    generation,
    released,
    result,
    until,
)
from tests.support.media.reference_media import Case, make_case
from tests.support.models.vision_models import FamilyName, clip, make_vision_model, picture
from tests.support.processes.ports import free_port

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    # An engine takes 10 s to start on a quiet machine and over a minute on a busy one.
    pytest.mark.timeout(420),
]

_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@dataclasses.dataclass
class Running:
    """An engine and the model it runs."""

    family: FamilyName
    directory: Path
    engine: EngineProcess

    @property
    def image(self) -> str:
        """An image's placeholder in a rendered prompt."""
        if self.family == "gemma3":
            return "<start_of_image>"
        return "<|vision_start|><|image_pad|><|vision_end|>"

    def images(self, *seeds: int, content: Content = Content.ROWS) -> Case:
        """Make a prompt with text around and between pictures of different sizes."""
        text = "look " + " and ".join(f"{self.image} here" for _ in seeds) + " so what"
        files = [picture(64 + 32 * (seed % 3), 64, seed=seed) for seed in seeds]
        return make_case(self.directory, text, files, content=content)

    def videos(self, content: Content = Content.ROWS) -> list[Case]:
        """Make three prompts with videos, whose answers have no near ties.

        The positions of the second video go beyond its height and width.
        """
        asked: list[tuple[str, list[Frames], list[Frames]]] = [
            (f"watch {_VIDEO} closely and say", [], [clip(4, 64, 64, fps=4.0, seed=20)]),
            (f"what moves in {_VIDEO} ?", [], [clip(24, 128, 128, fps=2.0, seed=10)]),
            (
                f"{self.image} then {_VIDEO} and {_VIDEO} end",
                [picture(96, 64, seed=0)],
                [clip(5, 96, 64, fps=3.0, seed=1), clip(8, 224, 112, fps=1.0, seed=2)],
            ),
        ]
        return [make_case(self.directory, *one, content=content, n=16) for one in asked]

    def submit(self, case: Case, **options: object) -> CollectingSink:
        """Start a request for a case."""
        return self.engine.submit(request(case, **options))


def request(case: Case, **options: object) -> GenerationRequest:
    settings: dict[str, Any] = {
        "max_new_tokens": len(case.token_ids),
        "ignore_eos": True,
        **options,
    }
    made = generation(list(case.prompt.token_ids), **settings)
    return dataclasses.replace(made, prompt=case.prompt)


def _not_a_number(case: Case) -> Case:
    """Put NaN into every tensor, and give it a digest of its own."""
    media = []
    for item in case.prompt.media:
        assert item.tensor is not None
        data = memoryview(bytearray(item.tensor.data))
        struct.pack_into("<f", data, 4, math.nan)
        tensor = dataclasses.replace(item.tensor, data=data)
        media.append(dataclasses.replace(item, tensor=tensor, digest=item.digest[::-1]))
    prompt = dataclasses.replace(case.prompt, media=tuple(media))
    return dataclasses.replace(case, prompt=prompt)


@pytest_asyncio.fixture(scope="class", loop_scope="session", params=get_args(FamilyName))
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    directory = make_vision_model(tmp_path_factory.mktemp("vision"), request.param)
    engine = await EngineProcess.launch(
        tmp_path_factory.mktemp("media") / "log",
        model_path=str(directory),
        extra={"chunked_prefill_size": 16},  # cuts through images and videos
    )
    await engine.ready()
    yield Running(request.param, directory, engine)
    assert await engine.close() == 0
    assert engine.failures == 0


def check_with_logprobs(case: Case, sink: CollectingSink) -> None:
    case.check_exactly(sink.token_ids, [entry.logprob for entry in sink.logprobs])


def has_video(family: FamilyName) -> bool:
    return family != "gemma3"


class TestAggregated:
    """The vision tower in the engine, or embeddings straight into it."""

    async def test_info(self, running: Running) -> None:
        media = (await running.engine.ready()).media
        assert media is not None
        assert media.family == running.family
        assert media.modalities == (
            set(Modality) if has_video(running.family) else {Modality.IMAGE}
        )
        assert media.embedding_width == (256 if running.family == "qwen3_vl" else 64)
        assert media.takes_pixels

    @pytest.mark.parametrize("content", Content)
    @pytest.mark.parametrize("seeds", [(1,), (1, 2), (2, 1, 1)])
    async def test_images(self, running: Running, seeds: tuple[int, ...], content: Content) -> None:
        case = running.images(*seeds, content=content)
        for _ in range(2):  # the second time from the prefix cache
            sink = running.submit(case)
            finish = await result(sink)
            case.check(sink.token_ids)
            assert finish.prompt_tokens == len(case.prompt)
            assert finish.media_tokens == case.prompt.media_tokens > 0
        assert finish.cached_tokens == len(case.prompt) - 1

    async def test_videos(self, running: Running) -> None:
        if not has_video(running.family):
            pytest.skip("this family has no video")
        for content in Content:
            for case in running.videos(content):
                sink = running.submit(case, logprobs=LogprobOptions())
                await result(sink)
                check_with_logprobs(case, sink)

    async def test_the_same_text_with_other_pictures_does_not_mix(self, running: Running) -> None:
        """Pixels and embeddings in one batch too, and text beside them."""
        cases = [
            running.images(seed, content=content)
            for seed in (0, 3, 6, 12, 15, 18)
            for content in Content
        ]
        assert len({tuple(case.token_ids[: case.sure]) for case in cases}) == 6
        for _ in range(2):
            sinks = [running.submit(case) for case in cases]
            texts = [running.engine.submit(generation([20 + n] * 9)) for n in range(4)]
            for sink, case in zip(sinks, cases, strict=True):
                await result(sink)
                case.check(sink.token_ids)
            for text in texts:
                await result(text)
        await released(running.engine)

    async def test_logprobs_and_stop_tokens(self, running: Running) -> None:
        case = running.images(1)
        options = LogprobOptions(top=2, prompt=True)
        stop = case.token_ids[3]
        sink = running.submit(
            case, logprobs=options, ignore_eos=False, stop_token_ids=(stop,), max_new_tokens=20
        )
        finish = await result(sink)
        assert (finish.reason, finish.matched_token_id) == (FinishReason.STOP, stop)
        assert sink.token_ids == case.token_ids[: case.token_ids.index(stop) + 1]
        assert [entry.token_id for entry in sink.logprobs] == sink.token_ids
        assert all(len(entry.top) == 2 for entry in sink.logprobs)
        named = [entry.token_id for entry in finish.prompt_logprobs]
        assert named == list(case.prompt.token_ids)

    async def test_numbers_that_are_not_finite_do_not_end_the_engine(
        self, running: Running
    ) -> None:
        """They make the logits NaN; drawing a token of those ends SGLang's scheduler."""
        for content in Content:
            case = running.images(3, content=content)
            with pytest.raises(InvalidRequestError, match="isn't finite"):
                await result(running.submit(_not_a_number(case), temperature=1.0, top_k=5))
            sink = running.submit(case)
            await result(sink)
            case.check(sink.token_ids)

    async def test_cancel(self, running: Running) -> None:
        case = running.images(1, 2)
        for at_once in (True, False):
            asked = request(case, max_new_tokens=LONG)
            sink = running.engine.submit(asked, abort_at_once=at_once)
            if not at_once:
                await sink.first_token()
            await aborted(running.engine, asked, sink)
            assert (await result(sink)).media_tokens == case.prompt.media_tokens
        sink = running.submit(case)
        await result(sink)
        case.check(sink.token_ids)


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Running, EngineProcess, int]]:
    directory = make_vision_model(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")
    logs, port = tmp_path_factory.mktemp("pair"), free_port()
    prefill = await EngineProcess.launch(
        logs / "prefill", role=Role.PREFILL, bootstrap_port=port, model_path=str(directory)
    )
    decode = await EngineProcess.launch(
        logs / "decode", role=Role.DECODE, model_path=str(directory)
    )
    await prefill.ready()
    media = (await decode.ready()).media
    assert media is not None
    assert not media.takes_pixels
    yield Running("qwen2_5_vl", directory, prefill), decode, port
    assert await decode.close() == 0
    assert await prefill.close() == 0


class TestPair:
    """Embeddings to prefill, geometry alone to decode; `e2e/multimodal` has Qwen3-VL."""

    async def test_images_and_videos_at_once(
        self, pair: tuple[Running, EngineProcess, int]
    ) -> None:
        prefill, decode, port = pair
        images = [
            *(prefill.images(seed) for seed in (0, 3, 6)),
            prefill.images(1, 2),
            prefill.images(1, content=Content.PIXELS),
        ]
        videos = [case for content in Content for case in prefill.videos(content)]
        cases = [*images, *videos]
        for _ in range(2):  # the second time from the prefix cache
            sinks = []
            for case in cases:
                ticket = Ticket("127.0.0.1", port, secrets.randbits(63))
                options = {"ticket": ticket, "logprobs": LogprobOptions()}
                sinks.append(prefill.submit(case, **options))
                at_decode = dataclasses.replace(case, prompt=case.at_decode)
                sinks.append(decode.submit(request(at_decode, **options)))
            for case, first, second in zip(cases, sinks[::2], sinks[1::2], strict=True):
                finish = await result(second)
                if case in videos:
                    check_with_logprobs(case, second)
                else:
                    case.check(second.token_ids)
                assert finish.media_tokens == case.prompt.media_tokens
                await result(first)
        await released(prefill.engine)
        await released(decode)

    async def test_cancel_while_decode_waits(
        self, pair: tuple[Running, EngineProcess, int]
    ) -> None:
        prefill, decode, port = pair
        case = prefill.images(1)
        asked = request(
            dataclasses.replace(case, prompt=case.at_decode),
            ticket=Ticket("127.0.0.1", port, secrets.randbits(63)),
        )
        sink = decode.submit(asked)
        await until(lambda view: view["used_tokens"] > 0, decode)
        await aborted(decode, asked, sink)
