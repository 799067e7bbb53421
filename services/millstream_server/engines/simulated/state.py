"""What changes the simulated engine's output: media, weights and adapters; what operators have set.

Every token is the one before plus a step, modulo the vocabulary, so each token shows what made it:

    step = 1 + digests + tensors + shift(weight version, unless it is the first) + shift(adapter)
    shift = zlib.crc32(name.encode()) % 97 + 1; 0 without an adapter
    digests = sum((i + 1) * zlib.crc32(digest) for i, digest in enumerate(item_digests)) % 2**32
    tensors = sum((i + 1) * zlib.crc32(data) for i, data in enumerate(tensor_bytes)) % 2**32
    tokens = [(last + n * step) % vocab_size for n in (1, 2, 3)]

So a mix-up of images or videos, of their order or of their bytes shows in every token. A decode
worker gets ``tensors`` from prefill, in place of the KV cache.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Sequence

from millstream_server.control.operations import LoraAdapter, MemoryTag
from millstream_server.generation.request import GenerationRequest
from millstream_server.media.items import MediaInput
from millstream_server.runtime.errors import AdapterNotFoundError, InternalError, ServingError

_MODULUS = 1 << 32


def version_shift(version: str, first: str = "") -> int:
    """Return what a weight version adds to the step; ``first``: the version at the start, 0."""
    return 0 if version == first else _shift(version)


def adapter_shift(adapter: str) -> int:
    """Return what an adapter adds to the step; 0 without one."""
    return _shift(adapter) if adapter else 0


def _shift(name: str) -> int:
    return zlib.crc32(name.encode()) % 97 + 1


def of_digests(media: Sequence[MediaInput]) -> int:
    """Return the number that follows from the items' digests; 0 without any."""
    return _weighted(zlib.crc32(item.digest) for item in media)


def of_tensors(media: Sequence[MediaInput]) -> int:
    """Return the number that follows from the tensors' bytes; 0 without any."""
    return _weighted(zlib.crc32(item.tensor.data) for item in media if item.tensor)


def _weighted(numbers: Iterable[int]) -> int:
    return sum(place * number for place, number in enumerate(numbers, 1)) % _MODULUS


class EngineState:
    """Read by the engine at each request, written by its controls."""

    def __init__(self, weight_version: str) -> None:
        self._first_version = weight_version
        self.weight_version = weight_version
        self.adapters: dict[str, LoraAdapter] = {}
        self.released: set[MemoryTag] = set()
        self.request_ended = asyncio.Event()
        """Set when a request with an adapter has ended; who waits for that clears it."""

    def shift_of(self, request: GenerationRequest) -> int:
        """Return what weights and adapter add to the step between a request's tokens."""
        shift = version_shift(self.weight_version, self._first_version)
        return shift + adapter_shift(request.adapter)

    def refusal(self, request: GenerationRequest) -> ServingError | None:
        """Return why a request can't run, or None."""
        if self.released:
            tags = ", ".join(sorted(tag.value for tag in self.released))
            return InternalError(f"a request came while the engine's memory is released: {tags}")
        if request.adapter and request.adapter not in self.adapters:
            return AdapterNotFoundError(f"adapter: {request.adapter!r} isn't loaded")
        return None

    def ended(self, request: GenerationRequest) -> None:
        if request.adapter:
            self.request_ended.set()
