"""Qwen2.5-VL: one run of tokens for an image or a video, between vision markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.families.grids import check_grid, flat_patch
from millstream_server.media.families.model_config import ModelConfig
from millstream_server.media.items import Geometry, Modality

_KEYS = {Modality.IMAGE: "image_token", Modality.VIDEO: "video_token"}
_DEFAULTS = {Modality.IMAGE: "<|image_pad|>", Modality.VIDEO: "<|video_pad|>"}
# Where config.json doesn't say, as in transformers.
_PATCH_SIZE = 14
_TOKENS_PER_SECOND = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25Vl:
    """The chat template writes the vision markers; the placeholder is the soft token itself."""

    name: str = "qwen2_5_vl"
    modalities: frozenset[Modality] = frozenset(Modality)
    image_tokens: int = 0
    sampling: FrameSampling = FrameSampling.ARANGE
    writes_times: bool = False
    repeats_frames: bool = True
    embedding_width: int
    pixel_shape: tuple[int, ...]
    positions_per_second: float
    soft_tokens: dict[Modality, int]
    placeholders: dict[Modality, str]
    merge: int

    @classmethod
    def read(cls, config: ModelConfig) -> Self:
        """Read the model's config files.

        Raises:
            UnusableFamilyError: a file or a value is missing.
        """
        config.require("tokenizer_config.json")
        return cls(
            embedding_width=config.integer("out_hidden_size", section="vision_config"),
            pixel_shape=flat_patch(config, _PATCH_SIZE),
            positions_per_second=config.number(
                "tokens_per_second", section="vision_config", default=_TOKENS_PER_SECOND
            ),
            soft_tokens={kind: config.integer(f"{key}_id") for kind, key in _KEYS.items()},
            placeholders={kind: config.token(key, _DEFAULTS[kind]) for kind, key in _KEYS.items()},
            merge=config.integer("spatial_merge_size", section="vision_config"),
        )

    def placeholder(self, modality: Modality) -> str:
        """See `Family.placeholder`."""
        return self.placeholders[modality]

    def soft_token(self, modality: Modality) -> int:
        """See `Family.soft_token`."""
        return self.soft_tokens[modality]

    def mark(self, modality: Modality, geometry: Geometry) -> str:
        """See `Family.mark`."""
        return self.placeholders[modality]

    def span_lengths(self, modality: Modality, tokens: int, geometry: Geometry) -> Sequence[int]:
        """See `Family.span_lengths`."""
        check_grid(tokens, geometry, self.merge)
        return (tokens,)
