"""Images and videos in a prompt: the same token ids as the model's own processor makes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from millstream_server.media import families
from millstream_server.media.families.family import Family
from millstream_server.media.families.placing import place
from millstream_server.media.items import Frames, Geometry, Modality, Span
from millstream_server.runtime.errors import InternalError, InvalidRequestError
from tests.support.models.vision_models import (
    FAMILIES,
    FamilyName,
    clip,
    make_vision_model,
    picture,
    reference_model,
    rendered,
)
from tests.support.vendor import trap

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
FIELD = "messages[0].content"


@dataclass(frozen=True)
class Item:
    modality: Modality
    tokens: int
    geometry: Geometry


@dataclass(frozen=True)
class Model:
    directory: Path
    family: Family
    encode: Callable[[str], list[int]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[FamilyName, Model]:
    return {name: _load(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


def _load(directory: Path, name: FamilyName) -> Model:
    make_vision_model(directory, name)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    family = families.load(directory)
    assert family is not None
    return Model(directory, family, lambda text: tokenizer.encode(text).ids)


def _text(chance: random.Random) -> str:
    words = ["", " ", "\n", "\n\n", "What is ", "é世界", "a  b\n", "<0.5 seconds>", "?\n\n "]
    return "".join(chance.choices(words, k=chance.randint(0, 4)))


def _frames(modality: Modality, chance: random.Random) -> Frames:
    width, height, seed = chance.randint(30, 180), chance.randint(30, 180), chance.randint(0, 99)
    if modality is IMAGE:
        return picture(width, height, seed=seed)
    # Qwen3-VL takes no video of one frame.
    fps = chance.choice([1.0, 2.0, 23.976, 29.97])
    return clip(chance.randint(2, 7), width, height, fps=fps, seed=seed)


def _conversation(model: Model, chance: random.Random) -> tuple[list[dict[str, Any]], list[Frames]]:
    kinds = [kind for kind in Modality if kind in model.family.modalities]
    messages, media = [], []
    for _ in range(chance.randint(1, 3)):
        parts: list[dict[str, Any]] = [{"type": "text", "text": _text(chance)}]
        for _ in range(chance.randint(0, 2)):
            frames = _frames(chance.choice(kinds), chance)
            media.append(frames)
            parts += [{"type": frames.modality.value}, {"type": "text", "text": _text(chance)}]
        messages.append({"role": "user", "content": parts})
    return messages, media


def _items(model: Model, media: list[Frames], inputs: dict[str, Any]) -> list[Item]:
    """Take tokens and geometry from what the model's processor returned."""
    processor = reference_model(model.directory).processor
    grids = {IMAGE: inputs.get("image_grid_thw"), VIDEO: inputs.get("video_grid_thw")}
    rows = {kind: iter([] if grid is None else grid.tolist()) for kind, grid in grids.items()}
    items = []
    for frames in media:
        if model.family.name == "gemma3":
            items.append(Item(IMAGE, 4, Geometry()))
            continue
        steps, height, width = next(rows[frames.modality])
        times = ()
        if frames.modality is VIDEO and model.family.name == "qwen3_vl":
            times = tuple(processor._calculate_timestamps(list(frames.indices), frames.fps, 2))
        geometry = Geometry(grid=(steps, height, width), timestamps_s=times)
        items.append(Item(frames.modality, steps * height * width // 4, geometry))
    return items


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_those_of_the_models_processor(
    models: dict[FamilyName, Model], name: FamilyName, seed: int
) -> None:
    model, chance = models[name], random.Random(seed)
    messages, media = _conversation(model, chance)
    text = rendered(model.directory, messages)
    inputs = reference_model(model.directory).inputs(
        text,
        [frames for frames in media if frames.modality is IMAGE],
        [frames for frames in media if frames.modality is VIDEO],
    )
    items = _items(model, media, inputs)

    token_ids, spans = place(text, model.family, items, model.encode, FIELD)

    assert token_ids == inputs["input_ids"][0].tolist()
    assert [sum(span.length for span in item) for item in spans] == [i.tokens for i in items]
    for item, runs in zip(items, spans, strict=True):
        soft = model.family.soft_token(item.modality)
        for span in runs:
            assert token_ids[span.start : span.start + span.length] == [soft] * span.length


@pytest.mark.parametrize("name", FAMILIES)
def test_text_needs_nothing(models: dict[FamilyName, Model], name: FamilyName) -> None:
    model = models[name]
    assert place("hello", model.family, [], model.encode, FIELD) == (model.encode("hello"), ())


def test_images_and_videos_are_matched_apart(models: dict[FamilyName, Model]) -> None:
    """A template may write a message's videos before its images."""
    model = models["qwen2_5_vl"]
    image = Item(IMAGE, 2, Geometry(grid=(1, 2, 4)))
    video = Item(VIDEO, 6, Geometry(grid=(3, 2, 4)))
    text = "<|video_pad|><|image_pad|>"
    ids, spans = place(text, model.family, [image, video], model.encode, FIELD)
    assert ids == [9] * 6 + [8] * 2
    assert spans == ((Span(6, 2),), (Span(0, 6),))


@pytest.mark.parametrize(
    ("name", "text", "items", "sentence"),
    [
        ("qwen2_5_vl", "<|image_pad|>", [], "1 image placeholders (<|image_pad|>) for 0 images"),
        ("qwen3_vl", "<|video_pad|>", [], "1 video placeholders (<|video_pad|>) for 0 videos"),
        ("qwen3_vl", "none", [Item(VIDEO, 1, Geometry())], "0 video placeholders (<|video_pad|>)"),
        ("gemma3", "<start_of_image> <start_of_image>", [Item(IMAGE, 4, Geometry())], "2 image"),
        ("gemma3", "none", [Item(VIDEO, 4, Geometry())], "this model reads no videos; 1 given"),
        ("gemma3", "<image_soft_token>", [], "has 1 of the gemma3 model's media tokens"),
    ],
)
def test_wrong_numbers_are_refused(
    models: dict[FamilyName, Model], name: FamilyName, text: str, items: list[Item], sentence: str
) -> None:
    model = models[name]
    with pytest.raises(InvalidRequestError) as caught:
        place(text, model.family, items, model.encode, FIELD)
    (violation,) = caught.value.violations
    assert violation.field == FIELD
    assert sentence in violation.description


@pytest.mark.parametrize(
    ("name", "modality", "item", "sentence"),
    [
        ("qwen2_5_vl", IMAGE, Item(IMAGE, 3, Geometry()), "3 tokens but no grid"),
        ("qwen2_5_vl", IMAGE, Item(IMAGE, 3, Geometry(grid=(1, 4, 4))), "grid [1, 4, 4] makes 4"),
        ("qwen3_vl", VIDEO, Item(VIDEO, 8, Geometry(grid=(2, 4, 4))), "2 grid steps but 0"),
        ("gemma3", IMAGE, Item(IMAGE, 3, Geometry()), "3 tokens; an image has 4"),
    ],
)
def test_contradicting_items_are_a_defect(
    models: dict[FamilyName, Model],
    name: FamilyName,
    modality: Modality,
    item: Item,
    sentence: str,
) -> None:
    model = models[name]
    text = model.family.placeholder(modality)
    with pytest.raises(InternalError) as caught:
        place(text, model.family, [item], model.encode, FIELD)
    assert sentence in caught.value.message


def test_a_foreign_tokenizer_is_noticed(models: dict[FamilyName, Model]) -> None:
    item = Item(IMAGE, 4, Geometry(grid=(1, 4, 4)))
    with pytest.raises(InternalError) as caught:
        place("<|image_pad|>", models["qwen3_vl"].family, [item], lambda _text: [77], FIELD)
    assert "has 1 runs of media tokens, of which the tokenizer made 0" in caught.value.message


@pytest.mark.parametrize(("name", "width"), [("qwen2_5_vl", 64), ("qwen3_vl", 256), ("gemma3", 64)])
def test_the_width_of_rows(models: dict[FamilyName, Model], name: FamilyName, width: int) -> None:
    assert models[name].family.embedding_width == width


@pytest.mark.parametrize(
    ("name", "pixel_shape", "image_tokens", "positions_per_second"),
    [
        ("qwen2_5_vl", (3 * 2 * 14**2,), 0, 4.0),
        ("qwen3_vl", (3 * 2 * 16**2,), 0, 0.0),
        ("gemma3", (3, 224, 224), 4, 0.0),
    ],
)
def test_facts_that_config_json_leaves_out_are_those_of_transformers(
    tmp_path: Path,
    name: FamilyName,
    pixel_shape: tuple[int, ...],
    image_tokens: int,
    positions_per_second: float,
) -> None:
    make_vision_model(tmp_path, name)
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    kept = ("out_hidden_size", "spatial_merge_size", "deepstack_visual_indexes")
    few = {key: value for key, value in vision.items() if key in kept}
    _change(tmp_path, "config.json", vision_config=few)
    family = families.load(tmp_path)
    assert family is not None
    assert (family.pixel_shape, family.image_tokens) == (pixel_shape, image_tokens)
    assert family.positions_per_second == positions_per_second
    _change(tmp_path, "config.json", vision_config=few | {"in_chans": 1, "num_channels": 1})
    family = families.load(tmp_path)
    assert family is not None
    assert math.prod(family.pixel_shape) == math.prod(pixel_shape) // 3


def _change(directory: Path, file: str, **values: object) -> None:
    path = directory / file
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_text_models_have_no_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert families.load(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "file", "values", "sentence"),
    [
        ("gemma3", "config.json", {"model_type": "pixtral"}, "model type 'pixtral' are not"),
        ("qwen2_5_vl", "config.json", {"image_token_id": None}, "image_token_id must be a whole"),
        ("qwen2_5_vl", "config.json", {"vision_config": {}}, "vision_config.out_hidden_size must"),
        (
            "qwen2_5_vl",
            "config.json",
            {
                "vision_config": {
                    "out_hidden_size": 8,
                    "spatial_merge_size": 2,
                    "tokens_per_second": "x",
                }
            },
            "vision_config.tokens_per_second must be a number, not 'x'",
        ),
        ("qwen3_vl", "config.json", {"vision_config": {}}, "deepstack_visual_indexes must be a"),
        ("gemma3", "preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan is on"),
        (
            "gemma3",
            "tokenizer_config.json",
            {"boi_token": None, "extra_special_tokens": None},
            "boi_token must be a token, not None",
        ),
    ],
)
def test_wrong_files_are_named(
    tmp_path: Path, name: FamilyName, file: str, values: dict[str, object], sentence: str
) -> None:
    make_vision_model(tmp_path, name)
    _change(tmp_path, file, **values)
    with pytest.raises(families.UnusableFamilyError) as caught:
        families.load(tmp_path)
    assert sentence in str(caught.value)
    assert file in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "gemma3")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(families.UnusableFamilyError, match=r"lacks tokenizer_config\.json"):
        families.load(tmp_path)


# ---- positions, which an engine computes ---------------------------------------------------------


@pytest.mark.parametrize(
    "mended", [True, pytest.param(False, marks=trap("a long video's positions are used again"))]
)
def test_text_in_our_reference_follows_the_last_position_of_a_video(
    models: dict[FamilyName, Model], *, mended: bool
) -> None:
    reference = reference_model(models["qwen2_5_vl"].directory)
    inputs = reference.inputs("<|video_pad|> so", videos=[clip(12, fps=2.0)])
    model, prompt = reference.model.model, inputs.pop("input_ids")
    get_rope_index = model.get_rope_index if mended else type(model).get_rope_index.__get__(model)
    positions, delta = get_rope_index(prompt, **inputs)
    rows = (prompt[0] == models["qwen2_5_vl"].family.soft_token(VIDEO)).sum().item()
    last = positions[..., :rows].max().item()
    assert last == 10, "6 steps of a second, 2 positions each"
    assert positions[:, 0, rows:].tolist() == [list(range(11, 11 + prompt.shape[1] - rows))] * 3
    assert delta.item() == 11 - rows
