"""Replacing a running engine's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from millstream_server.media.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of the model: its name in the checkpoint, its type and its shape."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class DiskWeights:
    """A checkpoint directory on the worker."""

    path: Path


@dataclass(frozen=True, slots=True)
class TensorWeights:
    """Tensors that were received: each with its bytes (row-major, little-endian)."""

    tensors: Sequence[tuple[NamedTensor, bytes | bytearray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastWeights:
    """Tensors that rank 0 of a torch process group broadcasts, in this order."""

    master_address: str
    """HOST:PORT."""
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    """"nccl" or "gloo"."""
    tensors: Sequence[NamedTensor]


@dataclass(frozen=True, slots=True)
class IpcWeights:
    """Tensors in the memory of this machine's GPUs: senders' ZeroMQ addresses, by GPU's UUID."""

    zmq_addresses: Mapping[str, str] = field(default_factory=dict)


WeightSource = DiskWeights | TensorWeights | BroadcastWeights | IpcWeights

Progress = Callable[[int, int], None]
"""Called with bytes checked and bytes in all (0: not known)."""


class WeightControl(Protocol):
    """All calls come from one event loop, one update at a time. Order: `check`, then `update`."""

    async def check_weights(self, source: WeightSource, progress: Progress) -> None:
        """Check that weights fit to the model, without touching the engine, which may serve.

        Raises:
            InvalidWeightsError: names, shapes or types don't fit, or files aren't complete.
            UnsupportedFeatureError: the engine doesn't take this source.
        """
        ...

    async def update_weights(self, source: WeightSource, version: str) -> None:
        """Replace the weights and empty the prefix cache; no request is open.

        The source was checked. Later answers have ``version`` in `Finish.weight_version`.

        Raises:
            InvalidWeightsError: they couldn't be loaded; the old ones are in place.
            EngineFailedError: the engine was lost.
        """
        ...
