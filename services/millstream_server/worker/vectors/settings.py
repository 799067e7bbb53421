"""Settings of embedding and ranking on a worker."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.runtime.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSettings:
    """How requests are batched and bounded; 0 leaves it to the engine."""

    max_batch_tokens: int = setting(
        0, help="most tokens of a batch for the engine; 0: what the engine runs at once"
    )
    max_open_tokens: int = setting(
        0, help="most tokens of open requests; 0: 256 batches of what the engine runs at once"
    )
