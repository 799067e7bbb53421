"""The Protocol of a model family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.items import Geometry, Modality


class Family(Protocol):
    """How one model places images and videos in its prompts; read from its config files.

    A chat template writes `placeholder` once per item. Each occurrence is replaced, in order, by
    `mark`, which has `soft_token` once per span; then the text is tokenized, and each soft token is
    repeated to its span's length. Strings and token ids only: no torch, no transformers.
    """

    @property
    def name(self) -> str:
        """As in `MediaModelInfo.family`."""
        ...

    @property
    def modalities(self) -> frozenset[Modality]:
        """Kinds of media that the model reads."""
        ...

    @property
    def embedding_width(self) -> int:
        """Width of an embedding's row, with what deepstack adds."""
        ...

    @property
    def image_tokens(self) -> int:
        """Tokens of every image; 0 where its grid of patches decides."""
        ...

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Shape of preprocessed pixels: [values] of a patch.

        [colours, height, width] in families without a grid, whose images all have one size.
        """
        ...

    @property
    def positions_per_second(self) -> float:
        """Positions (M-RoPE) per second of a video; 0: they don't depend on its time."""
        ...

    @property
    def sampling(self) -> FrameSampling:
        """Which frames of a video the model's own processor takes; unused without videos."""
        ...

    @property
    def writes_times(self) -> bool:
        """Whether a video's geometry has `timestamps_s`, else `seconds_per_step`."""
        ...

    @property
    def repeats_frames(self) -> bool:
        """Whether the model's own processor fills up a video that is shorter than a grid step."""
        ...

    def placeholder(self, modality: Modality) -> str:
        """Return what the chat template writes for an item."""
        ...

    def soft_token(self, modality: Modality) -> int:
        """Return the id of the token in whose place embeddings are read."""
        ...

    def mark(self, modality: Modality, geometry: Geometry) -> str:
        """Return the text that replaces the placeholder, with one soft token per span."""
        ...

    def span_lengths(self, modality: Modality, tokens: int, geometry: Geometry) -> Sequence[int]:
        """Return the tokens of each span; their sum is ``tokens``.

        Raises:
            ValueError: ``tokens`` and ``geometry`` contradict each other, in a sentence with both
            numbers.
        """
        ...
