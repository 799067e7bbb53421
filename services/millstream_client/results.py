"""What comes of a request: vectors, images and videos. An answer is in `answers`."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.v1 import diffusion_pb2, embedding_pb2
from millstream_client.errors import from_request_error

_SUFFIXES = {"image/png": ".png", "image/webp": ".webp", "video/mp4": ".mp4"}


@dataclass(slots=True)
class Embeddings:
    """The vectors of some texts, in their order."""

    vectors: list[array[float]] = field(default_factory=list)
    """float32; ``numpy.array(embeddings.vectors)`` makes a matrix of them."""
    model: str = ""
    request_id: str = ""
    input_tokens: int = 0

    def __iter__(self) -> Iterator[array[float]]:
        return iter(self.vectors)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> array[float]:
        return self.vectors[index]


@dataclass(slots=True)
class CollectedVectors:
    """The vectors of one request so far."""

    count: int
    request_id: str = ""
    model: str = ""
    input_tokens: int = 0
    complete: bool = False
    found: dict[int, array[float]] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """False: vectors can be asked for again."""
        return False

    def add(self, message: embedding_pb2.EmbedResponse) -> None:
        """Add one message of the stream, which has one request.

        Raises:
            MillstreamError: the request failed.
        """
        for part in message.vectors:
            numbers = array("f", part.values)
            if sys.byteorder == "big":
                numbers.byteswap()
            width = part.dimensions
            for i, index in enumerate(part.indices):
                self.found[index] = numbers[i * width : (i + 1) * width]
        for error in message.errors:
            raise from_request_error(error.error)
        for finished in message.finished:
            self.request_id, self.model = finished.request_id, finished.model
            self.input_tokens = finished.usage.input_tokens
            self.complete = len(self.found) == self.count


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """One image or video."""

    data: bytes = field(repr=False)
    """The file; empty if it was delivered as a URL."""
    media_type: str
    """``image/png``, ``image/webp`` or ``video/mp4``."""
    seed: int
    url: str = ""

    @property
    def suffix(self) -> str:
        """The usual suffix of a file's name, such as ``.png``; empty if the type isn't known."""
        return _SUFFIXES.get(self.media_type, "")

    def save(self, path: str | Path) -> Path:
        target = Path(path)
        target.write_bytes(self.data)
        return target


@dataclass(slots=True)
class GeneratedMedia:
    """What was made of one request."""

    request_id: str = ""
    files: list[GeneratedFile] = field(default_factory=list)
    settings: diffusion_pb2.DiffusionSettings = field(
        default_factory=diffusion_pb2.DiffusionSettings
    )
    """What they were made with, the server's defaults filled in."""
    usage: diffusion_pb2.DiffusionUsage = field(default_factory=diffusion_pb2.DiffusionUsage)
    complete: bool = False
    _data: dict[int, bytearray] = field(default_factory=dict, repr=False)

    @property
    def begun(self) -> bool:
        return bool(self._data) or self.complete

    def add(self, message: Any) -> None:
        """Add one message of the stream, which has one request.

        Raises:
            MillstreamError: the request failed.
        """
        for chunk in message.chunks:
            self._data.setdefault(chunk.output, bytearray()).extend(chunk.data)
        for error in message.errors:
            raise from_request_error(error.error)
        for finished in message.finished:
            self.request_id = finished.request_id
            self.settings.CopyFrom(finished.settings)
            self.usage.CopyFrom(finished.usage)
            self.files = [
                GeneratedFile(
                    bytes(self._data.get(i, b"")), output.media_type, output.seed, output.url
                )
                for i, output in enumerate(finished.outputs)
            ]
            self._data.clear()
            self.complete = True
