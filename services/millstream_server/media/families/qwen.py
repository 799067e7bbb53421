"""Qwen2.5-VL and Qwen3-VL: a grid of patches decides how many tokens an item has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.families.family import Family, ModelConfig, UnusableFamilyError
from millstream_server.media.items import Geometry, Modality

_KEYS = {Modality.IMAGE: "image_token", Modality.VIDEO: "video_token"}
_DEFAULTS = {Modality.IMAGE: "<|image_pad|>", Modality.VIDEO: "<|video_pad|>"}
# Where config.json doesn't say, as in transformers.
_PATCH_SIZE_2_5, _PATCH_SIZE_3 = 14, 16
_TOKENS_PER_SECOND = 4.0


def _tokens(config: ModelConfig) -> dict[str, Any]:
    """Read what both families have: media tokens, which are placeholders too, and the merge."""
    return {
        "soft_tokens": {kind: config.integer(f"{key}_id") for kind, key in _KEYS.items()},
        "placeholders": {kind: config.token(key, _DEFAULTS[kind]) for kind, key in _KEYS.items()},
        "merge": config.integer("spatial_merge_size", section="vision_config"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25Vl(Family):
    """One run for an image or a video; the chat template writes the vision markers."""

    name: str = "qwen2_5_vl"
    sampling: FrameSampling = FrameSampling.ARANGE
    repeats_frames: bool = True
    merge: int

    @classmethod
    def read(cls, config: ModelConfig) -> Self:
        """Read the model's config files; raises UnusableFamilyError."""
        config.require("tokenizer_config.json")
        return cls(
            embedding_width=config.integer("out_hidden_size", section="vision_config"),
            pixel_shape=_flat_patch(config, _PATCH_SIZE_2_5),
            positions_per_second=config.number(
                "tokens_per_second", section="vision_config", default=_TOKENS_PER_SECOND
            ),
            **_tokens(config),
        )

    def mark(self, modality: Modality, geometry: Geometry) -> str:
        return self.placeholders[modality]

    def span_lengths(self, modality: Modality, tokens: int, geometry: Geometry) -> Sequence[int]:
        _check_grid(tokens, geometry, self.merge)
        return (tokens,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Vl(Family):
    """An image is one run; each step of a video has its time and its own run.

    A row is the merged patch and, beside it, that of each deepstack level.
    """

    name: str = "qwen3_vl"
    writes_times: bool = True
    merge: int
    vision_start: str
    vision_end: str

    @classmethod
    def read(cls, config: ModelConfig) -> Self:
        """Read the model's config files; raises UnusableFamilyError."""
        config.require("tokenizer_config.json")
        levels = config.file("config.json").get("vision_config", {}).get("deepstack_visual_indexes")
        if not isinstance(levels, list):
            path = config.directory / "config.json"
            raise UnusableFamilyError(
                f"{path}: vision_config.deepstack_visual_indexes must be a list, not {levels!r}"
            )
        width = config.integer("out_hidden_size", section="vision_config")
        return cls(
            embedding_width=width * (1 + len(levels)),
            pixel_shape=_flat_patch(config, _PATCH_SIZE_3),
            vision_start=config.token("vision_start_token", "<|vision_start|>"),
            vision_end=config.token("vision_end_token", "<|vision_end|>"),
            **_tokens(config),
        )

    def mark(self, modality: Modality, geometry: Geometry) -> str:
        token = self.placeholders[modality]
        if modality is Modality.IMAGE:
            return token
        run = f"{self.vision_start}{token}{self.vision_end}"
        return "".join(f"<{time:.1f} seconds>{run}" for time in geometry.timestamps_s)

    def span_lengths(self, modality: Modality, tokens: int, geometry: Geometry) -> Sequence[int]:
        steps = _check_grid(tokens, geometry, self.merge)[0]
        if modality is Modality.IMAGE:
            return (tokens,)
        if len(geometry.timestamps_s) != steps:
            raise ValueError(
                f"the video has {steps} grid steps but {len(geometry.timestamps_s)} timestamps"
            )
        return (tokens // steps,) * steps


def _check_grid(tokens: int, geometry: Geometry, merge: int) -> tuple[int, int, int]:
    """Return the grid, in which ``merge`` x ``merge`` patches make one token; raises ValueError."""
    if geometry.grid is None:
        raise ValueError(f"the item has {tokens} tokens but no grid")
    _, height, width = geometry.grid
    if height % merge or width % merge:
        raise ValueError(
            f"the grid {list(geometry.grid)} must have a height and a width that {merge} divides"
        )
    found = math.prod(geometry.grid) // merge**2
    if found != tokens or tokens < 1:
        raise ValueError(
            f"the item has {tokens} tokens, but its grid {list(geometry.grid)} makes {found}"
        )
    return geometry.grid


def _flat_patch(config: ModelConfig, patch_size: int) -> tuple[int]:
    """Return the shape of a patch's values; ``patch_size`` is the default of its side in pixels."""
    section = "vision_config"
    channels = config.integer("in_chans", section=section, default=3)
    channels = config.integer("in_channels", section=section, default=channels)
    frames = config.integer("temporal_patch_size", section=section, default=2)
    side = config.integer("patch_size", section=section, default=patch_size)
    return (channels * frames * side**2,)
