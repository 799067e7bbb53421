"""What every model family is, and the config files it is read from."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.items import Geometry, Modality


class UnusableFamilyError(ValueError):
    """The model's config files don't say how it places media; the text names the file and key."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The JSON files of a model's folder; a file that isn't there is empty.

    The methods raise UnusableFamilyError: a file isn't a JSON object, or it lacks a value that has
    no default.
    """

    directory: Path

    def file(self, name: str) -> Mapping[str, Any]:
        """Read ``name``."""
        path = self.directory / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UnusableFamilyError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise UnusableFamilyError(f"{path} must hold a JSON object")
        return content

    def integer(self, key: str, *, section: str = "", default: int | None = None) -> int:
        """Read a whole number, at least 0, from config.json."""
        value = self._value(key, section, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            name = f"{section}.{key}" if section else key
            raise UnusableFamilyError(
                f"{self.directory / 'config.json'}: {name} must be a whole number, not {value!r}"
            )
        return value

    def number(self, key: str, *, section: str = "", default: float | None = None) -> float:
        """Read a number, at least 0, from config.json."""
        value = self._value(key, section, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            name = f"{section}.{key}" if section else key
            raise UnusableFamilyError(
                f"{self.directory / 'config.json'}: {name} must be a number, not {value!r}"
            )
        return float(value)

    def _value(self, key: str, section: str, default: float | None) -> object:
        content: Any = self.file("config.json")
        return (content.get(section) or {} if section else content).get(key, default)

    def token(self, key: str, default: str | None = None) -> str:
        """Read a token's text from tokenizer_config.json, as transformers does."""
        config = self.file("tokenizer_config.json")
        extra = config.get("extra_special_tokens")
        found = config.get(key) or (extra.get(key) if isinstance(extra, dict) else None) or default
        if isinstance(found, dict):
            found = found.get("content")
        if not isinstance(found, str) or not found:
            raise UnusableFamilyError(
                f"{self.directory / 'tokenizer_config.json'}: {key} must be a token, not {found!r}"
            )
        return found

    def require(self, name: str) -> None:
        """Check that a file is there."""
        if not (self.directory / name).is_file():
            raise UnusableFamilyError(
                f"{self.directory} lacks {name}, which says how media are placed in a prompt"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(ABC):
    """How one model places images and videos in its prompts; read from its config files.

    A chat template writes `placeholder` once per item. Each occurrence is replaced, in order, by
    `mark`, which has `soft_token` once per span; then the text is tokenized, and each soft token is
    repeated to its span's length. Strings and token ids only: no torch, no transformers.
    """

    name: str
    """As in `MediaModelInfo.family`."""
    modalities: frozenset[Modality] = frozenset(Modality)
    """Kinds of media that the model reads."""
    embedding_width: int
    """Width of an embedding's row, with what deepstack adds."""
    image_tokens: int = 0
    """Tokens of every image; 0 where its grid of patches decides."""
    pixel_shape: tuple[int, ...]
    """Shape of preprocessed pixels: [values] of a patch; [colours, height, width] in families
    without a grid, whose images all have one size."""
    positions_per_second: float = 0.0
    """Positions (M-RoPE) per second of a video; 0: they don't depend on its time."""
    sampling: FrameSampling = FrameSampling.LINSPACE
    """Which frames of a video the model's own processor takes; unused without videos."""
    writes_times: bool = False
    """Whether a video's geometry has `timestamps_s`, else `seconds_per_step`."""
    repeats_frames: bool = False
    """Whether the model's own processor fills up a video that is shorter than a grid step."""
    placeholders: Mapping[Modality, str]
    soft_tokens: Mapping[Modality, int]

    def placeholder(self, modality: Modality) -> str:
        """Return what the chat template writes for an item."""
        return self.placeholders[modality]

    def soft_token(self, modality: Modality) -> int:
        """Return the id of the token in whose place embeddings are read."""
        return self.soft_tokens[modality]

    @abstractmethod
    def mark(self, modality: Modality, geometry: Geometry) -> str:
        """Return the text that replaces the placeholder, with one soft token per span."""

    @abstractmethod
    def span_lengths(self, modality: Modality, tokens: int, geometry: Geometry) -> Sequence[int]:
        """Return the tokens of each span; their sum is ``tokens``.

        Raises:
            ValueError: ``tokens`` and ``geometry`` contradict each other, in a sentence with both
            numbers.
        """
