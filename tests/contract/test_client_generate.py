"""The client library: images, videos, vectors and scores, against a server that is no model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from millstream.v1 import diffusion_pb2
from millstream_client import (
    IncompleteAnswerError,
    InvalidRequestError,
    MediaFileError,
    RequestCancelledError,
    Retry,
)
from millstream_testing.waiting import until
from tests.support.clients.clients import KINDS, Kind
from tests.support.processor.fake_generators import STEPS, FakeDiffusion, FakeEmbedding, generators

both = pytest.mark.parametrize("kind", KINDS)
QUICK = Retry(attempts=3, first_pause_s=0.01, wait_s=5.0)


@dataclass
class Suite:
    address: str = ""
    diffusion: FakeDiffusion = field(default_factory=FakeDiffusion)
    embedding: FakeEmbedding = field(default_factory=FakeEmbedding)


@pytest.fixture
async def suite() -> AsyncIterator[Suite]:
    started = Suite()
    async with generators(started.diffusion, started.embedding) as started.address:
        yield started


@both
async def test_an_image_with_its_progress(suite: Suite, kind: Kind, tmp_path: Path) -> None:
    async with kind.connect(suite.address) as client:
        stream = client.generate_image("a cat", seed=5, n=2, steps=7, width=64, height=32)
        seen = [await kind.next(stream) for _ in range(1 + STEPS)]
        assert [p.queue_position for p in seen] == [2, 0, 0, 0]
        assert [p.step for p in seen] == [0, 1, 2, 3]
        assert seen[-1].preview == b"small"
        media = await kind.run(stream.result)
        assert [file.data for file in media.files] == [b"a cat|5|1|", b"a cat|6|1|"]
        assert [(file.seed, file.suffix) for file in media.files] == [(5, ".png"), (6, ".png")]
        assert media.settings.steps == STEPS
        assert stream.request_id == "made-here"
        path = media.files[1].save(tmp_path / "cat.png")
        assert path.read_bytes() == b"a cat|6|1|"
    sent = suite.diffusion.starts[0].options
    assert (sent.n, sent.steps, sent.width, sent.height, sent.seed) == (2, 7, 64, 32, 5)
    assert not sent.HasField("guidance_scale")


@both
async def test_an_image_from_an_image(suite: Suite, kind: Kind, tmp_path: Path) -> None:
    picture = tmp_path / "given.png"
    picture.write_bytes(b"pixels")
    async with kind.connect(suite.address) as client:
        for given in (picture, b"pixels"):
            stream = client.generate_image(
                "a dog", image=given, strength=0.5, format=diffusion_pb2.IMAGE_FORMAT_WEBP
            )
            media = await kind.run(stream.result)
            assert media.files[0].data == b"a dog|0|2|pixels"
    assert suite.diffusion.starts[0].input_image.strength == 0.5


@both
async def test_an_image_from_an_image_that_no_message_holds(suite: Suite, kind: Kind) -> None:
    large = bytes(range(256)) * (20 << 10)  # 5 MiB
    async with kind.connect(suite.address, retry=QUICK) as client:
        # Sent again after a failure: with its file.
        media = await kind.run(client.generate_image("lost once", image=large).result)
    assert media.files[0].data == b"lost once|0|1|" + large
    assert [start.input_image.upload_id != "" for start in suite.diffusion.starts] == [True, True]


async def test_an_input_image_that_cannot_be_read_is_refused_here(suite: Suite) -> None:
    kind: Kind = KINDS[0].values[0]  # type: ignore[assignment]
    async with kind.connect(suite.address) as client:
        for given in ("missing.png", "https://example.com/a.png"):
            with pytest.raises(MediaFileError):
                client.generate_image("a dog", image=given)
        with pytest.raises(TypeError, match="'size' is no option"):
            client.generate_image("a dog", size=3)
    assert not suite.diffusion.starts


@both
async def test_a_video(suite: Suite, kind: Kind) -> None:
    async with kind.connect(suite.address) as client:
        media = await kind.run(client.generate_video("rain", frames=9, fps=8).result)
    assert [(file.data, file.suffix) for file in media.files] == [(b"rain|0|9|", ".mp4")]


@both
async def test_a_lost_worker_costs_nothing_but_time(suite: Suite, kind: Kind) -> None:
    async with kind.connect(suite.address, retry=QUICK) as client:
        media = await kind.run(client.generate_image("lost once").result)
    assert media.files[0].data == b"lost once|0|1|"
    assert len(suite.diffusion.starts) == 2


@both
async def test_a_bad_option_is_named(suite: Suite, kind: Kind) -> None:
    async with kind.connect(suite.address, retry=QUICK) as client:
        failed = await kind.failure(client.generate_image("bad one", request_id="mine").result)
    assert isinstance(failed, InvalidRequestError)
    assert [v.field for v in failed.violations] == ["options.steps"]
    assert failed.request_id == "mine"
    assert len(suite.diffusion.starts) == 1


@both
async def test_half_a_file_is_no_result(suite: Suite, kind: Kind) -> None:
    async with kind.connect(suite.address, retry=QUICK) as client:
        failed = await kind.failure(client.generate_image("cut off").result)
    assert isinstance(failed, IncompleteAnswerError)
    assert len(suite.diffusion.starts) == 1, "bytes had come, so it must not be sent again"


@both
async def test_leaving_early_ends_the_call(suite: Suite, kind: Kind) -> None:
    async with kind.connect(suite.address) as client:
        stream = client.generate_image("slow one")
        await kind.next(stream)
        await kind.close(stream)
        await until(lambda: not suite.diffusion.open)


async def test_cancel_ends_a_call_that_another_task_reads(suite: Suite) -> None:
    kind: Kind = KINDS[0].values[0]  # type: ignore[assignment]
    async with kind.connect(suite.address) as client:
        stream = client.generate_image("slow one")
        await anext(stream)
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            await stream.result()


@both
async def test_vectors_come_in_the_order_of_the_texts(suite: Suite, kind: Kind) -> None:
    async with kind.connect(suite.address) as client:
        found = await kind.run(client.embed, ["a", "bbb", [4, 5]], dimensions=2, normalize=False)
        assert [list(vector) for vector in found] == [[1, 0], [3, 1], [9, 2]]
        assert (found.model, found.input_tokens, len(found)) == ("fake", 3, 3)
        one = await kind.run(client.embed, "four")
        ids = await kind.run(client.embed, [7, 8])
    assert list(one[0]) == [4, 0]
    assert list(ids[0]) == [15, 0]
    start = suite.embedding.starts[0]
    assert (start.dimensions, start.normalize) == (2, False)
    assert not suite.embedding.starts[1].HasField("normalize")


@both
async def test_texts_that_do_not_fit_in_one_request(suite: Suite, kind: Kind) -> None:
    texts = ["x" * (1 << 20)] * 4 + ["y"] * 2100
    async with kind.connect(suite.address) as client:
        found = await kind.run(client.embed, texts)
    assert [vector[0] for vector in found] == [1 << 20] * 4 + [1] * 2100
    sizes = [len(start.inputs) for start in suite.embedding.starts]
    assert sum(sizes) == len(texts)
    assert max(start.ByteSize() for start in suite.embedding.starts) < 4 << 20
    assert max(sizes) <= 2048


@both
async def test_documents_are_ranked(suite: Suite, kind: Kind) -> None:
    documents = ["dogs", "red cats run", "cats"]
    async with kind.connect(suite.address) as client:
        results = await kind.run(client.rerank, "red cats", documents, top_n=2)
    assert [(ranked.index, ranked.logit) for ranked in results] == [(1, 2), (2, 1)]
