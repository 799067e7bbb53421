"""Prompts with media as transformers makes them: expanded ids, rows of its tower, or pixels."""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from millstream_server.generation.request import Prompt
from millstream_server.media import families
from millstream_server.media.items import (
    Content,
    EmbeddingTicket,
    Frames,
    Geometry,
    MediaInput,
    Modality,
    Span,
)
from millstream_server.media.tensor import ElementType, Tensor, TensorSpec
from tests.support.models.vision_models import reference_model

TICKS_PER_STEP = 2
_NEAR_TIE = 0.005  # of the logits' standard deviation
_LOGPROB_TOLERANCE = 1e-3
_PIXELS = {Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"}


@dataclass(frozen=True)
class Case:
    """A prompt and transformers' greedy answer to it."""

    prompt: Prompt
    token_ids: list[int]
    sure: int
    """How many tokens come before the first near tie, which rounding may decide otherwise."""
    logprobs: list[float]
    """Of each token."""

    def check(self, token_ids: Sequence[int]) -> None:
        """Check an answer: the same tokens up to a near tie, and as many."""
        assert len(token_ids) == len(self.token_ids)
        assert list(token_ids[: self.sure]) == self.token_ids[: self.sure]

    def check_exactly(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Check an answer: every token and its logprob."""
        assert self.sure == len(self.token_ids), "rounding may decide a token: ask something else"
        assert list(token_ids) == self.token_ids
        assert list(logprobs) == pytest.approx(self.logprobs, rel=0, abs=_LOGPROB_TOLERANCE)

    @property
    def at_decode(self) -> Prompt:
        """The prompt as a decode worker gets it: geometry alone."""
        media = tuple(replace(i, ticket=None, tensor=None) for i in self.prompt.media)
        return replace(self.prompt, media=media)


def make_case(
    directory: Path,
    text: str,
    images: Sequence[Frames] = (),
    videos: Sequence[Frames] = (),
    *,
    content: Content = Content.ROWS,
    n: int = 8,
) -> Case:
    """Make a case of a rendered ``text`` with the items in order, images first."""
    reference = reference_model(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = reference.inputs(text, images, videos)
        # SGLang reads an image's tokens in order on the CPU; of its backends only Triton's lets
        # them see each other, as Gemma 3 was trained.
        if (kinds := inputs.get("token_type_ids")) is not None:
            inputs["token_type_ids"] = kinds * 0
        output = reference.model.generate(
            **inputs,
            max_new_tokens=n,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    prompt_ids = inputs["input_ids"][0].tolist()
    items = [
        *_items(directory, inputs, Modality.IMAGE, images, content),
        *_items(directory, inputs, Modality.VIDEO, videos, content),
    ]
    placed = _placed(directory, prompt_ids, items)
    token_ids = output.sequences[0].tolist()[len(prompt_ids) :]
    logprobs = [
        float(row[0].log_softmax(-1)[token])
        for row, token in zip(output.logits, token_ids, strict=True)
    ]
    return Case(Prompt(prompt_ids, placed), token_ids, _sure(output.logits), logprobs)


def _sure(logits: Sequence[Any]) -> int:
    for index, row in enumerate(logits):
        first, second = row[0].topk(2).values.tolist()
        if first - second < _NEAR_TIE * float(row.std()):
            return index
    return len(logits)


def _items(
    directory: Path,
    inputs: dict[str, Any],
    modality: Modality,
    files: Sequence[Frames],
    content: Content,
) -> list[MediaInput]:
    if not files:
        return []
    grids = inputs.get(f"{modality.value}_grid_thw")
    shapes = [tuple(grid) for grid in grids.tolist()] if grids is not None else []
    pixels = inputs[_PIXELS[modality]]
    if content is Content.PIXELS:
        parts = pixels.split([math.prod(shape) for shape in shapes] or 1)
    else:
        parts = _rows(directory, pixels, modality, grids)
    times = inputs.get("second_per_grid_ts")
    return [
        _item(
            part,
            modality,
            Geometry(
                grid=shapes[index] if shapes else None,
                seconds_per_step=float(times[index])
                if modality is Modality.VIDEO and times is not None
                else 0.0,
                timestamps_s=_timestamps(files[index], shapes[index])
                if modality is Modality.VIDEO and times is None
                else (),
            ),
            hashlib.sha256(files[index].data).digest(),
            content,
        )
        for index, part in enumerate(parts)
    ]


def _timestamps(video: Frames, grid: tuple[int, ...]) -> tuple[float, ...]:
    frames = [index / video.fps for index in video.indices]
    return tuple(sum(frames[2 * step : 2 * step + 2]) / TICKS_PER_STEP for step in range(grid[0]))


def _rows(directory: Path, pixels: Any, modality: Modality, grids: Any) -> list[Any]:
    import torch  # noqa: PLC0415 - only tests with a model need it

    model = reference_model(directory).model.model
    read = getattr(model, f"get_{modality.value}_features")
    arguments = {} if grids is None else {f"{modality.value}_grid_thw": grids}
    with torch.no_grad():
        features = read(pixels, **arguments)
    rows = [part.reshape(-1, part.shape[-1]) for part in features.pooler_output]
    deep = getattr(features, "deepstack_features", None)
    if not deep:
        return rows
    levels = [torch.cat(list(d)) if isinstance(d, (list, tuple)) else d for d in deep]
    whole = torch.cat([torch.cat(rows), *levels], dim=1)
    return list(whole.split([len(part) for part in rows]))


def _item(
    part: Any, modality: Modality, geometry: Geometry, digest: bytes, content: Content
) -> MediaInput:
    spec = TensorSpec(ElementType.FLOAT32, tuple(part.shape))
    data = memoryview(bytearray(part.contiguous().numpy().tobytes()))
    ticket = EmbeddingTicket(address="encode:1", lease="lease", tensor=spec, content=content)
    return MediaInput(
        modality=modality,
        spans=(),
        geometry=geometry,
        digest=digest,
        ticket=ticket,
        content=content,
        tensor=Tensor(spec, data),
    )


@functools.cache
def _family(directory: Path) -> Any:
    return families.load(directory)


def _placed(
    directory: Path, token_ids: Sequence[int], items: Sequence[MediaInput]
) -> tuple[MediaInput, ...]:
    """Give each item its spans, which are the runs of its soft token in order."""
    family = _family(directory)
    runs = {
        modality: iter(_runs(token_ids, family.soft_token(modality)))
        for modality in family.modalities
    }
    placed = []
    for item in items:
        patches = math.prod(item.geometry.grid) // 4 if item.geometry.grid else 0
        tokens = patches or family.image_tokens
        spans = tuple(
            next(runs[item.modality])
            for _ in family.span_lengths(item.modality, tokens, item.geometry)
        )
        placed.append(replace(item, spans=spans))
    return tuple(sorted(placed, key=lambda item: item.spans[0].start))


def _runs(token_ids: Sequence[int], soft_token: int) -> list[Span]:
    runs: list[Span] = []
    for position, token in enumerate(token_ids):
        if token != soft_token:
            continue
        if runs and runs[-1].start + runs[-1].length == position:
            runs[-1] = Span(runs[-1].start, runs[-1].length + 1)
        else:
            runs.append(Span(position, 1))
    return runs
