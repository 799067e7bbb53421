"""What operators have set on a simulated engine: weights, adapters, released memory."""

from __future__ import annotations

import asyncio

from millstream_server.control.operations import LoraAdapter, MemoryTag
from millstream_server.engines.simulated.shifts import adapter_shift, version_shift
from millstream_server.generation.request import GenerationRequest
from millstream_server.runtime.errors import AdapterNotFoundError, InternalError, ServingError


class EngineState:
    """Read by the engine at each request, written by its controls."""

    def __init__(self, weight_version: str) -> None:
        """Start with the first weights and without adapters."""
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
        """Note the end of a request."""
        if request.adapter:
            self.request_ended.set()
