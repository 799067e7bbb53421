"""Requests with media on a family made up for tests: four patches per token, as Qwen's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from millstream_server.generation.generator import MediaModel
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.media.families.family import Family
from millstream_server.media.items import (
    Content,
    EmbeddingTicket,
    Geometry,
    MediaInput,
    Modality,
    Span,
)
from millstream_server.media.tensor import ElementType, Tensor, TensorSpec

IMAGE_TOKEN, VIDEO_TOKEN = 90, 91
WIDTH = 8
PIXELS = 12


class Patches(Family):
    """A video has a span per step of its grid."""

    def mark(self, modality: Modality, geometry: Geometry) -> str:
        """Return the text that replaces a placeholder."""
        steps = geometry.grid[0] if geometry.grid else 1
        return f"<{modality.value}>," * steps

    def span_lengths(self, modality: Modality, tokens: int, geometry: Geometry) -> Sequence[int]:
        """Divide the tokens among the grid's steps."""
        grid = geometry.grid or (1, 1, 1)
        if math.prod(grid) != 4 * tokens:
            message = f"the grid {list(grid)} gives {math.prod(grid) // 4} tokens, not {tokens}"
            raise ValueError(message)
        steps = grid[0] if modality is Modality.VIDEO else 1
        return [tokens // steps] * steps


RULES = Patches(
    name="patches",
    embedding_width=WIDTH,
    pixel_shape=(PIXELS,),
    positions_per_second=2.0,
    placeholders={modality: f"<{modality.value}>" for modality in Modality},
    soft_tokens={Modality.IMAGE: IMAGE_TOKEN, Modality.VIDEO: VIDEO_TOKEN},
)
MODEL = MediaModel(
    modalities=RULES.modalities,
    family=RULES.name,
    embedding_width=WIDTH,
    soft_tokens=RULES.soft_tokens,
    takes_pixels=True,
    pixel_shape=RULES.pixel_shape,
    positions_per_second=RULES.positions_per_second,
    rules=RULES,
)


def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Make a tensor whose numbers follow from ``name``."""
    spec = TensorSpec(ElementType.FLOAT32, shape)
    one = hashlib.sha256(name.encode()).digest()
    # No bits of an exponent: numbers that can be computed with.
    data = bytearray(byte & 0x3F for byte in one * (spec.nbytes // len(one) + 1))
    return Tensor(spec, memoryview(data)[: spec.nbytes])


def item(
    name: str,
    *starts: int,
    modality: Modality = Modality.IMAGE,
    content: Content = Content.ROWS,
    length: int = 2,
    seconds_per_step: float = 0.0,
) -> MediaInput:
    """Make an item with a span of ``length`` at each start, and the ticket of its tensor."""
    tokens = length * len(starts)
    grid = (len(starts), 2, 2 * length)
    shape = (tokens, WIDTH) if content is Content.ROWS else (math.prod(grid), PIXELS)
    return MediaInput(
        modality=modality,
        spans=tuple(Span(start, length) for start in starts),
        geometry=Geometry(grid=grid, seconds_per_step=seconds_per_step),
        digest=hashlib.sha256(name.encode()).digest(),
        ticket=EmbeddingTicket(
            address="encode:1",
            lease=name,
            tensor=TensorSpec(ElementType.FLOAT32, shape),
            content=content,
        ),
        content=content,
    )


def request(*media: MediaInput, length: int = 20, max_new_tokens: int = 4) -> GenerationRequest:
    """Make a request whose prompt has the items' placeholders in place, and 1 elsewhere."""
    token_ids = [1] * length
    for one in media:
        for span in one.spans:
            token = MODEL.soft_tokens[one.modality]
            token_ids[span.start : span.start + span.length] = [token] * span.length
    return GenerationRequest(
        request_id="r",
        prompt=Prompt(token_ids, media),
        sampling=Sampling(max_new_tokens=max_new_tokens, ignore_eos=True),
    )


def fetched(
    asked: GenerationRequest, tensors: Mapping[str, Tensor] | None = None
) -> GenerationRequest:
    """Fill in every item's tensor, as a worker does that has fetched it."""
    media = tuple(
        replace(
            one,
            tensor=(tensors or {}).get(one.ticket.lease)
            or tensor(one.ticket.lease, one.ticket.tensor.shape),
        )
        for one in asked.prompt.media
        if one.ticket
    )
    return replace(asked, prompt=replace(asked.prompt, media=media))


def geometry_only(asked: GenerationRequest) -> GenerationRequest:
    """Make the request of a decode worker."""
    media = tuple(replace(one, ticket=None, tensor=None) for one in asked.prompt.media)
    return replace(asked, prompt=replace(asked.prompt, media=media))
