"""What operators can do with a running engine: a Protocol per kind of operation, plain types."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from millstream_server.media.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A loaded LoRA adapter."""

    name: str
    rank: int = 0
    """0: not known."""
    path: Path | None = None
    """Its directory; None: it is another process's."""


class AdapterControl(Protocol):
    """All calls come from one event loop, one at a time. Requests may run."""

    async def load_adapter(self, name: str, path: Path) -> LoraAdapter:
        """Load an adapter; no adapter of that name is loaded.

        Raises:
            InvalidWeightsError: its files are missing, incomplete, or don't fit to the model.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Remove a loaded adapter; waits for the requests that use it. No new ones come."""
        ...


class MemoryTag(enum.Enum):
    """A part of an engine's memory; the names are the contract's."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"
    CUDA_GRAPH = "cuda_graph"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of an engine's processes, measured."""

    host_bytes: int
    """Resident, without counting shared pages twice where the system can tell."""
    device_bytes: int = 0


class MemoryControl(Protocol):
    """All calls come from one event loop, one at a time."""

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """Give memory back. The engine is idle; ``tags`` aren't released yet, and not empty.

        Raises:
            ServingError: it failed; the engine may have failed with it.
        """
        ...

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Take memory again, in any order of tags; they are released.

        Raises:
            ServingError: it failed; the engine may have failed with it.
        """
        ...

    async def memory_use(self) -> MemoryUse:
        """Measure the memory of the engine's processes."""
        ...


class PauseMode(enum.Enum):
    """What becomes of running requests; the names are the contract's."""

    IN_PLACE = "in_place"
    """They keep their KV cache and go on later."""
    RETRACT = "retract"
    """They give their KV cache back and compute it again later."""
    ABORT = "abort"
    """They fail with `WorkerPausedError`."""


class PauseControl(Protocol):
    """All calls come from one event loop, one at a time."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop the steps; requests are accepted, wait, and can be aborted. It isn't paused yet.

        Raises:
            UnsupportedFeatureError: the engine doesn't have this mode.
        """
        ...

    async def go_on(self) -> None:
        """Go on with the steps. It is paused."""
        ...


class CacheControl(Protocol):
    """Empties the prefix cache."""

    async def flush_cache(self) -> None:
        """Empty the prefix cache. No request is open.

        Raises:
            EngineBusyError: the engine still has requests.
        """
        ...


class ProfileActivity(enum.Enum):
    """What a profile records; the names are the contract's."""

    CPU = "cpu"
    GPU = "gpu"
    MEMORY = "memory"


class ProfileControl(Protocol):
    """All calls come from one event loop, one at a time. Requests may run."""

    async def start_profile(
        self, directory: Path, activities: Collection[ProfileActivity], steps: int
    ) -> None:
        """Record into new files in ``directory``, which exists.

        Empty ``activities``: CPU and, where there is one, GPU. ``steps`` above 0: stop by itself
        after so many. None is recorded now.

        Raises:
            UnsupportedFeatureError: the engine can't record an activity.
        """
        ...

    async def stop_profile(self) -> None:
        """Write the files, unless it has stopped by itself; returns when they are complete."""
        ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineControls:
    """An engine's operations; None: it doesn't have them. `Drain` needs none of them."""

    memory: MemoryControl | None = None
    pause: PauseControl | None = None
    cache: CacheControl | None = None
    weights: WeightControl | None = None
    profile: ProfileControl | None = None
    adapters: AdapterControl | None = None


NO_CONTROLS = EngineControls()


@runtime_checkable
class Controlled(Protocol):
    """An engine that operators can control while it runs."""

    @property
    def controls(self) -> EngineControls:
        """Its operations; valid from start to close."""
        ...
