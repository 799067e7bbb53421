"""The commands image, video, embed and rerank, each a process of its own, over a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.processes.command_line import Outcome, millstream
from tests.support.processor.fake_generators import FakeDiffusion, FakeEmbedding, generators


@pytest.fixture
async def diffusion() -> FakeDiffusion:
    return FakeDiffusion()


@pytest.fixture
async def embedding() -> FakeEmbedding:
    return FakeEmbedding()


@pytest.fixture
async def address(diffusion: FakeDiffusion, embedding: FakeEmbedding) -> AsyncIterator[str]:
    async with generators(diffusion, embedding) as address:
        yield address


async def test_an_image_is_written_where_it_should_be(
    address: str, diffusion: FakeDiffusion, tmp_path: Path
) -> None:
    target, preview = tmp_path / "cat.webp", tmp_path / "preview.webp"
    done = await millstream(
        *("image", "a cat", "--address", address, "-o", str(target), "--seed", "7"),
        *("--size", "64x32", "--steps", "9", "--guidance", "2.5", "--negative", "a dog"),
        *("--preview", str(preview), "--show-usage"),
    )
    assert (done.code, done.out) == (0, f"{target} (seed 7)\n")
    assert "3 steps" not in done.out
    assert target.read_bytes() == b"a cat|7|2|"
    assert preview.read_bytes() == b"small"
    options = diffusion.starts[0].options
    assert (options.width, options.height, options.steps) == (64, 32, 9)
    assert (options.guidance_scale, options.negative_prompt) == (2.5, "a dog")
    assert options.preview_every_steps == 1


async def test_several_images_are_numbered(address: str, tmp_path: Path) -> None:
    target = tmp_path / "cat.png"
    done = await millstream("image", "a cat", "--address", address, "-o", str(target), "-n", "2")
    assert done.code == 0, done.err
    assert done.out.split() == [
        *(str(tmp_path / "cat-0.png"), "(seed", "0)"),
        *(str(tmp_path / "cat-1.png"), "(seed", "1)"),
    ]
    assert (tmp_path / "cat-1.png").read_bytes() == b"a cat|1|1|"


async def test_an_image_from_an_image(
    address: str, diffusion: FakeDiffusion, tmp_path: Path
) -> None:
    given, target = tmp_path / "given.png", tmp_path / "made.png"
    given.write_bytes(b"pixels")
    done = await millstream(
        *("image", "a cat", "--address", address, "-o", str(target)),
        *("--input", str(given), "--strength", "0.4"),
    )
    assert done.code == 0, done.err
    assert target.read_bytes() == b"a cat|0|1|pixels"
    assert diffusion.starts[0].input_image.strength == pytest.approx(0.4)


async def test_a_video_is_written(address: str, tmp_path: Path) -> None:
    target = tmp_path / "rain.mp4"
    done = await millstream(
        *("video", "rain", "--address", address, "-o", str(target), "--frames", "9", "--fps", "8")
    )
    assert done.code == 0, done.err
    assert target.read_bytes() == b"rain|0|9|"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["image", "bad steps"], ": --steps: is -1; give 1 to 50"),
        (["image", "a cat", "-o", "cat.jpg"], "-o must end in .png or .webp"),
        (["image", "a cat", "--input", "missing.png"], "missing.png can't be sent"),
        (["image", "a cat", "-o", "/no/such/place/cat.png"], "can't write /no/such/place/cat.png"),
        (["image", "a cat", "--size", "big"], "'big' is not a size such as 512x512"),
        (["video", "rain", "-o", "rain.png"], "-o must end in .mp4"),
    ],
)
async def test_what_goes_wrong_is_said_in_a_line(address: str, flags: list[str], says: str) -> None:
    done = await millstream(*flags, "--address", address)
    assert done.code != 0
    assert done.out == ""
    assert says in done.err
    assert "Traceback" not in done.err


def _lines(done: Outcome) -> list[dict[str, object]]:
    return [json.loads(line) for line in done.out.splitlines()]


async def test_embed_prints_a_line_of_json_for_each_text(
    address: str, embedding: FakeEmbedding
) -> None:
    done = await millstream("embed", "a", "bbb", "--prompt-name", "query", "--address", address)
    assert done.code == 0, done.err
    assert embedding.starts[0].prompt_name == "query"
    assert _lines(done) == [
        {"text": "a", "embedding": [1.0, 0.0]},
        {"text": "bbb", "embedding": [3.0, 1.0]},
    ]
    piped = await millstream("embed", "-", "--address", address, stdin="one\n\nthree\n")
    assert [line["text"] for line in _lines(piped)] == ["one", "three"]
    empty = await millstream("embed", "-", "--address", address, stdin="\n")
    assert (empty.code, empty.err) == (1, "error: there is no text\n")


async def test_embed_compares(address: str) -> None:
    done = await millstream("embed", "--compare", "a", "bbb", "--address", address)
    assert [row.split()[-2:] for row in done.out.splitlines() if "." in row] == [
        ["1.00", "3.00"],
        ["3.00", "10.00"],
    ]


async def test_rerank_prints_the_best_first(address: str, embedding: FakeEmbedding) -> None:
    done = await millstream(
        *("rerank", "red cats", "dogs", "red cats run", "cats", "--address", address),
        *("--top-n", "2", "--instruction", "name an animal"),
    )
    assert done.code == 0, done.err
    assert embedding.reranks[0].instruction == "name an animal"
    rows = [row.split() for row in done.out.splitlines() if row.strip().startswith("0.")]
    assert [(row[1], " ".join(row[2:])) for row in rows] == [("2", "red cats run"), ("3", "cats")]


async def test_tables_are_also_json(address: str) -> None:
    at = ("--address", address, "--json")
    ranked = await millstream("rerank", "red cats", "dogs", "red cats run", *at, "--top-n", "1")
    (best,) = _lines(ranked)
    assert (best["index"], best["document"]) == (1, "red cats run")
    compared = await millstream("embed", "--compare", "a", "bbb", *at)
    assert _lines(compared) == [
        {"text": "a", "similarities": [1.0, 3.0]},
        {"text": "bbb", "similarities": [3.0, 10.0]},
    ]
