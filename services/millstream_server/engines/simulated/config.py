"""The simulated model and machine."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.engines.base import Role
from millstream_server.generation.generator import MediaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """The simulated model and machine."""

    role: Role = Role.AGGREGATED
    vocab_size: int = 32000
    context_length: int = 8192
    block_size: int = 16
    total_blocks: int = 1 << 20
    """KV blocks of each data-parallel rank."""
    max_running_requests: int = 4096
    """Of all ranks together; each has an equal share."""
    dp_size: int = 1
    """Data-parallel ranks, each with its own queue, steps and KV cache."""
    step_s: float = 0.0
    """Seconds per decode step, for any batch size; 0: as fast as possible."""
    prefill_s_per_token: float = 0.0
    """Seconds per prompt token that isn't cached."""
    load_s: float = 0.0
    weight_version: str = ""
    """Version of the weights at the start; it leaves the step between tokens at 1."""
    eos_token_id: int | None = None
    bootstrap_host: str = "127.0.0.1"
    bootstrap_port: int = 0
    transfer_timeout_s: float = 30.0
    media: MediaModel | None = None
    """What the model takes besides text; None: nothing."""

    @property
    def max_running_per_rank(self) -> int:
        """Most requests at once on one data-parallel rank."""
        return max(1, self.max_running_requests // self.dp_size)
