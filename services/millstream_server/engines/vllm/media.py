"""A prompt's images and videos as vLLM's features: embeddings or pixels that were made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.generation.request import GenerationRequest
from millstream_server.runtime.errors import UnsupportedFeatureError


def media_features(
    built: BuiltEngine, request: GenerationRequest, role: Role
) -> Sequence[Any]:
    """Make vLLM's `MultiModalFeatureSpec`s.

    Raises:
        UnsupportedFeatureError: this adapter has no pictures yet.
    """
    raise UnsupportedFeatureError.of("media", "this worker's engine takes text only")
