"""Gemma 3: every image has the same number of tokens, between image markers and empty lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from millstream_server.media.families.family import Family, ModelConfig, UnusableFamilyError
from millstream_server.media.items import Geometry, Modality

_FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3(Family):
    """Images only, no position ids of their own."""

    name: str = "gemma3"
    modalities: frozenset[Modality] = frozenset({Modality.IMAGE})
    soft: str
    end: str

    @classmethod
    def read(cls, config: ModelConfig) -> Self:
        """Read the model's config files; raises UnusableFamilyError."""
        config.require("tokenizer_config.json")
        _refuse_pan_and_scan(config)
        return cls(
            embedding_width=config.integer("hidden_size", section="text_config"),
            pixel_shape=_whole_image(config),
            image_tokens=config.integer("mm_tokens_per_image"),
            soft_tokens={Modality.IMAGE: config.integer("image_token_index")},
            soft=config.token("image_token"),
            placeholders={Modality.IMAGE: config.token("boi_token")},
            end=config.token("eoi_token"),
        )

    def mark(self, modality: Modality, geometry: Geometry) -> str:
        return f"\n\n{self.placeholders[modality]}{self.soft}{self.end}\n\n"

    def span_lengths(self, modality: Modality, tokens: int, geometry: Geometry) -> Sequence[int]:
        if tokens != self.image_tokens:
            raise ValueError(f"the item has {tokens} tokens; an image has {self.image_tokens}")
        return (tokens,)


def _whole_image(config: ModelConfig) -> tuple[int, int, int]:
    """Where config.json doesn't say, as in transformers."""
    size = config.integer("image_size", section="vision_config", default=224)
    return (config.integer("num_channels", section="vision_config", default=3), size, size)


def _refuse_pan_and_scan(config: ModelConfig) -> None:
    """It makes several pictures of one."""
    for name in _FILES:
        content = config.file(name)
        sections = [content, content.get("image_processor"), content.get("images_kwargs")]
        if any(isinstance(part, dict) and part.get("do_pan_and_scan") for part in sections):
            raise UnusableFamilyError(
                f"{config.directory / name}: do_pan_and_scan is on, which isn't supported; "
                "set it to false"
            )
