"""Checks of a prompt's images and videos: every refusal names the item and both numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_server.control.engine import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.media_checks import check_tensors, tokens_left
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.ticket import Ticket
from millstream_server.generation.validation import check_request
from millstream_server.media.items import Content, Geometry, MediaInput, Modality, Span
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.runtime.errors import (
    EmbeddingTransferError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from tests.support.media.media_requests import (
    IMAGE_TOKEN,
    MODEL,
    VIDEO_TOKEN,
    WIDTH,
    fetched,
    geometry_only,
    item,
    request,
)

INFO = GeneratorInfo(
    engine="simulated",
    engine_version="1",
    vocab_size=100,
    context_length=200,
    block_size=1,
    total_blocks=1000,
    max_running_requests=4,
    media=MODEL,
)
IMAGE = item("a", 2)
VIDEO = item("v", 8, 12, modality=Modality.VIDEO, seconds_per_step=0.5)
TICKET = Ticket("host", 1, 1)


def _check(
    asked: GenerationRequest, info: GeneratorInfo = INFO, role: Role = Role.AGGREGATED
) -> None:
    check_request(asked, info, role)


def _refusal(asked: GenerationRequest, **options: Any) -> tuple[str, str]:
    """Return the one violation that a request is refused for."""
    with pytest.raises(InvalidRequestError) as caught:
        _check(asked, **options)
    assert not isinstance(caught.value, UnsupportedFeatureError)
    (violation,) = caught.value.violations
    assert caught.value.message == f"{violation.field}: {violation.description}"
    return violation.field, violation.description


def _with(changed: MediaInput, **changes: Any) -> GenerationRequest:
    """Change an item of a request whose placeholders stay where they are."""
    asked = request(IMAGE, VIDEO)
    media = tuple(replace(one, **changes) if one is changed else one for one in asked.prompt.media)
    return replace(asked, prompt=replace(asked.prompt, media=media))


def test_good_items_pass_in_every_role() -> None:
    asked = request(IMAGE, VIDEO)
    _check(asked)
    _check(replace(asked, ticket=TICKET), role=Role.PREFILL)
    _check(replace(geometry_only(asked), ticket=TICKET), role=Role.DECODE)
    _check(request(*(item(str(i), 2 + 5 * i, content=Content.PIXELS) for i in range(3))))


@pytest.mark.parametrize(
    ("spans", "field", "sentence"),
    [
        ((), "media[0].spans", "is empty"),
        ((Span(2, 0),), "media[0].spans[0]", "has the length 0"),
        ((Span(19, 2),), "media[0].spans[0]", "ends at 21, but the prompt has 20 tokens"),
        ((Span(3, 2),), "media[0].spans[0]", "covers 2 tokens, but 1 of them are 90"),
        ((Span(8, 2),), "media[0].spans[0]", "covers 2 tokens, but 0 of them are 90"),
        (
            (Span(2, 1), Span(3, 1)),
            "media[0].spans[1]",
            "begins at 3, but the one before ends at 3",
        ),
        ((Span(2, 2), Span(2, 2)), "media[0].spans[1]", "begins at 2, but the one before ends at"),
    ],
)
def test_spans_must_be_where_the_placeholders_are(
    spans: tuple[Span, ...], field: str, sentence: str
) -> None:
    found = _refusal(_with(IMAGE, spans=spans))
    assert found[0] == field
    assert sentence in found[1]


def test_items_come_in_the_order_of_the_prompt() -> None:
    asked = request(IMAGE, VIDEO)
    swapped = Prompt(asked.token_ids, (VIDEO, IMAGE))
    field, sentence = _refusal(replace(asked, prompt=swapped))
    assert field == "media[1].spans[0]"
    assert sentence.startswith("begins at 2, but the one before ends at 14: ")


def test_two_items_cannot_share_placeholders() -> None:
    asked = request(IMAGE)
    twice = Prompt(asked.token_ids, (IMAGE, IMAGE))
    assert _refusal(replace(asked, prompt=twice))[0] == "media[1].spans[0]"


@pytest.mark.parametrize("token", [IMAGE_TOKEN, VIDEO_TOKEN])
@pytest.mark.parametrize("media", [(), (IMAGE, VIDEO)])
def test_a_placeholder_that_no_item_covers_is_refused(
    token: int, media: tuple[MediaInput, ...]
) -> None:
    asked = request(*media)
    asked.prompt.token_ids[17] = token  # type: ignore[index]
    field, sentence = _refusal(asked)
    assert field == "token_ids[17]"
    covered = 0 if not media else {IMAGE_TOKEN: 2, VIDEO_TOKEN: 4}[token]
    assert f"the prompt has {covered + 1} of them, its items cover {covered}" in sentence


def test_the_same_tokens_are_text_to_a_model_without_media() -> None:
    asked = request()
    asked.prompt.token_ids[17] = IMAGE_TOKEN  # type: ignore[index]
    _check(asked, info=replace(INFO, media=None))


@pytest.mark.parametrize(
    ("geometry", "field", "sentence"),
    [
        (Geometry(grid=(1, 2, 2)), "geometry", "gives 1 tokens, not 2"),
        (Geometry(), "geometry", "the grid [1, 1, 1] gives 0 tokens, not 2"),
    ],
)
def test_geometry_must_fit_the_tokens(geometry: Geometry, field: str, sentence: str) -> None:
    found = _refusal(_with(IMAGE, geometry=geometry))
    assert found[0] == f"media[0].{field}"
    assert sentence in found[1]


def test_a_video_has_a_span_for_each_step() -> None:
    asked = _with(VIDEO, geometry=Geometry(grid=(4, 2, 2)))
    assert _refusal(asked) == (
        "media[1].spans",
        "have the lengths 2, 2; its geometry needs 1, 1, 1, 1",
    )


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["seconds_per_step", "timestamps_s"])
def test_times_are_finite(seconds: float, name: str) -> None:
    changes: dict[str, Any] = {
        name: seconds if name == "seconds_per_step" else (0.5, seconds),
    }
    found = _refusal(_with(VIDEO, geometry=replace(VIDEO.geometry, **changes)))
    assert found[0] == "media[1].geometry"


def test_positions_of_a_video_stay_within_the_context() -> None:
    """2 steps of 45 s are 180 positions: with 16 that aren't its tokens' and 4 more, all of 200.

    The picture's two tokens are a row: two positions.
    """
    _check(_with(VIDEO, geometry=replace(VIDEO.geometry, seconds_per_step=45.0)))
    for seconds, count in ((45.5, 182), (1e300, 1 << 32)):
        field, sentence = _refusal(
            _with(VIDEO, geometry=replace(VIDEO.geometry, seconds_per_step=seconds))
        )
        assert field == "media[1].geometry.seconds_per_step"
        assert f"{count} positions" in sentence
        assert "context length of 200" in sentence


def test_a_videos_positions_are_in_place_of_its_tokens_not_beside_them() -> None:
    """It has 80 tokens in 2 steps of 5 s, each a row of 40: 40 positions, the longest side's."""
    video = item("v", 8, 60, modality=Modality.VIDEO, length=40, seconds_per_step=5.0)
    asked = request(video, length=120, max_new_tokens=80)
    assert tokens_left(asked.prompt, 200, MODEL) == 80
    _check(asked)
    longer = replace(video, geometry=replace(video.geometry, seconds_per_step=22.0))
    prompt = replace(asked.prompt, media=(longer,))  # 88 positions, in place of 80 tokens
    assert tokens_left(prompt, 200, MODEL) == 72
    assert tokens_left(prompt, 200, None) == 80
    assert "88 positions" in _refusal(replace(asked, prompt=prompt))[1]
    _check(replace(asked, prompt=prompt, sampling=replace(asked.sampling, max_new_tokens=72)))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_digest_has_32_bytes(size: int) -> None:
    assert _refusal(_with(IMAGE, digest=bytes(size))) == (
        "media[0].digest",
        f"has {size} bytes; a SHA-256 has 32",
    )


def test_tickets_by_role() -> None:
    asked = request(IMAGE)
    bare = geometry_only(asked)
    assert _refusal(bare)[0] == "media[0].ticket"
    assert _refusal(replace(bare, ticket=TICKET), role=Role.PREFILL)[0] == "media[0].ticket"
    field, sentence = _refusal(replace(asked, ticket=TICKET), role=Role.DECODE)
    assert field == "media[0].ticket"
    assert "leave it out" in sentence


@pytest.mark.parametrize(
    ("content", "shape", "expected"),
    [
        (Content.ROWS, (1, WIDTH), [2, WIDTH]),
        (Content.ROWS, (3, WIDTH), [2, WIDTH]),
        (Content.ROWS, (2, WIDTH - 1), [2, WIDTH]),
        (Content.ROWS, (2 * WIDTH,), [2, WIDTH]),
        (Content.PIXELS, (2, WIDTH), [8, 12]),
        (Content.PIXELS, (7, 12), [8, 12]),
    ],
)
def test_a_tensor_must_have_the_shape_that_the_model_reads(
    content: Content, shape: tuple[int, ...], expected: list[int]
) -> None:
    assert IMAGE.ticket is not None
    ticket = replace(IMAGE.ticket, content=content, tensor=TensorSpec(ElementType.BFLOAT16, shape))
    asked = request(replace(IMAGE, ticket=ticket, content=content))
    assert _refusal(asked) == (
        "media[0].ticket.tensor.shape",
        f"is {list(shape)}; 2 tokens of this model need {expected}",
    )


def test_pixels_need_an_engine_that_takes_them() -> None:
    asked = request(item("a", 2, content=Content.PIXELS))
    info = replace(INFO, media=replace(MODEL, takes_pixels=False))
    assert _refusal(asked, info=info)[0] == "media[0].ticket.content"


def test_pixels_and_embeddings_do_not_mix_in_a_prompt() -> None:
    field, sentence = _refusal(request(item("a", 2, content=Content.PIXELS), item("b", 8)))
    assert field == "media"
    assert "alike" in sentence


def test_too_many_items() -> None:
    many = [item(str(index), 1 + 3 * index) for index in range(257)]
    asked = request(*many, length=800)
    assert _refusal(asked, info=replace(INFO, context_length=1000)) == (
        "media",
        "has 257 items; a prompt has at most 256",
    )


@pytest.mark.parametrize(
    ("info", "kinds"),
    [
        (replace(INFO, media=None), ["images", "videos"]),
        (
            replace(
                INFO,
                media=replace(
                    MODEL,
                    modalities=frozenset({Modality.IMAGE}),
                    soft_tokens={Modality.IMAGE: IMAGE_TOKEN},
                ),
            ),
            ["videos"],
        ),
    ],
)
def test_a_model_that_takes_no_such_media_says_so(info: GeneratorInfo, kinds: list[str]) -> None:
    with pytest.raises(UnsupportedFeatureError) as caught:
        _check(request(IMAGE, VIDEO), info=info)
    assert [violation.description for violation in caught.value.violations] == [
        f"this model takes no {kind}; use a model that does" for kind in kinds
    ]
    assert caught.value.violations[-1].field == "media[1]"


def test_a_processor_checks_kinds_alone() -> None:
    model = replace(MODEL, soft_tokens={}, rules=None, modalities=frozenset({Modality.IMAGE}))
    info = replace(INFO, media=model)
    check_request(geometry_only(request(IMAGE)), info, Role.AGGREGATED)
    with pytest.raises(UnsupportedFeatureError) as caught:
        check_request(request(IMAGE, VIDEO), info, Role.AGGREGATED)
    (violation,) = caught.value.violations
    assert violation.field == "media[1]"


def test_what_was_fetched_must_be_what_the_ticket_says() -> None:
    media = fetched(request(IMAGE, VIDEO)).prompt.media
    check_tensors(media)
    good = media[1].tensor
    assert good is not None
    shorter = replace(good, data=good.data[:-4])
    other = replace(good, spec=TensorSpec(ElementType.FLOAT32, (3, WIDTH)))
    for bad, sentence in (
        (None, r"^media\[1\]: nothing arrived in place of \[4, 8\]$"),
        (shorter, r"^media\[1\]: 124 bytes arrived; its tensor has 128$"),
        (other, r"^media\[1\]: \[3, 8\] arrived in place of \[4, 8\]$"),
    ):
        with pytest.raises(EmbeddingTransferError, match=sentence):
            check_tensors((media[0], replace(media[1], tensor=bad)))
