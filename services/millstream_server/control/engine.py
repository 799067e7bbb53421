"""What every engine has, of any ability: start and stop, info, load, warm-up, progress of loading.

Plain dataclasses only, no protobuf and no vendor's types. What an engine does with requests is one
Protocol per ability, defined with the ability (`generation.generator`).
"""

from __future__ import annotations

import asyncio
import enum
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from millstream_server.control.operations import LoraAdapter
from millstream_server.runtime.errors import EngineFailedError, ServingError


class Role(enum.Enum):
    """Which part of a request a worker runs."""

    AGGREGATED = "aggregated"
    """Prompt and tokens."""
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"
    """Images and videos to embeddings."""
    DIFFUSION = "diffusion"
    """Prompts to text, images or videos."""
    EMBEDDING = "embedding"
    """Texts to vectors and scores."""

    def __init__(self, value: str) -> None:
        self.hands_off = value in {"prefill", "decode"}
        """Whether a request is shared by two workers, and so needs a ticket in this role."""


class Task(enum.Enum):
    """Something that a model can do; a value is the RPC that does it."""

    CHAT = "ProcessorService.Chat"
    COMPLETE = "ProcessorService.Complete"
    EMBED = "EmbeddingService.Embed"
    RERANK = "EmbeddingService.Rerank"
    GENERATE_IMAGE = "DiffusionService.GenerateImage"
    GENERATE_VIDEO = "DiffusionService.GenerateVideo"
    GENERATE_TEXT = "DiffusionService.GenerateText"


WHOLE_TASKS = {
    Task.EMBED: Role.EMBEDDING,
    Task.RERANK: Role.EMBEDDING,
    Task.GENERATE_IMAGE: Role.DIFFUSION,
    Task.GENERATE_VIDEO: Role.DIFFUSION,
}
"""Those of which one worker, of this role, runs each request whole."""
TEXT_TASKS = frozenset(Task) - WHOLE_TASKS.keys()
"""Those whose result is tokens, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a started engine; each ability has its own kind, which says what they mean."""

    engine: str
    """Vendor name, as in `gen_ai.provider.name`: "sglang", "simulated"."""
    engine_version: str
    max_running_requests: int
    dp_size: int = 1
    """Data-parallel ranks."""
    weight_version: str = ""
    """Version of the weights that new requests run on."""
    adapters: tuple[LoraAdapter, ...] = ()
    """Loaded LoRA adapters, by name."""
    device: str = ""
    """What it runs on, "cuda" or "cpu"; empty: not known, or simulated."""

    def tasks(self, role: Role) -> frozenset[Task]:
        """Return what a worker of this role does, by itself or with others.

        CHAT isn't among them: it depends on the model's files.
        """
        return frozenset()

    @property
    def dp_ranks(self) -> range:
        """Data-parallel ranks that requests can name; empty: they name none."""
        return range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """The current load of one data-parallel rank."""

    running_requests: int
    queued_requests: int
    queued_tokens: int = 0
    """Prompt tokens of queued requests that still have to be computed, as far as is known."""
    used_blocks: int
    total_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """An engine's current load."""

    running_requests: int
    queued_requests: int = 0
    used_blocks: int = 0
    """Of the KV cache, as the next; 0 without one."""
    total_blocks: int = 0
    ranks: tuple[RankLoad, ...] = ()
    """Of each data-parallel rank, from 0; empty: there is one, with the whole load."""

    @classmethod
    def of_ranks(
        cls, ranks: Sequence[RankLoad], *, open_requests: int, total_blocks: int
    ) -> EngineLoad:
        """Join what ranks report; of ``open_requests`` some are on their way, in no report yet."""
        running = sum(load.running_requests for load in ranks)
        queued = max(sum(load.queued_requests for load in ranks), open_requests - running)
        if len(ranks) == 1:
            ranks = [replace(ranks[0], queued_requests=queued)]
        return cls(
            running_requests=running,
            # With several ranks above their sum: where those on their way go isn't known.
            queued_requests=queued,
            used_blocks=sum(load.used_blocks for load in ranks),
            total_blocks=total_blocks,
            ranks=tuple(ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """A worker whose engine has started."""

    role: Role
    model: str
    engine: EngineInfo
    worker_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random; a restarted worker has another."""
    encoder: EngineInfo | None = None
    """What its EncodeService encodes (an `encode.encoder.EncoderInfo`); None: it has none."""
    batched_controls: bool = False
    """Whether it accepts several starts and cancels in one message of its stream."""

    @property
    def tasks(self) -> frozenset[Task]:
        return self.engine.tasks(self.role)


class Engine(Protocol):
    """An engine's start, stop and load.

    Order of calls: `start`, `warm_up`, then the ability's calls and `load` in any order, `close`.
    All calls come from one event loop. `close` may be called twice and after a failed `start`.
    """

    async def start(self, on_failure: Callable[[ServingError], None]) -> EngineInfo:
        """Load the model without blocking the event loop.

        ``on_failure`` is called at most once, if the engine fails later; every open request has
        failed by then. The worker then stops: a failed engine is not restarted in place.

        Raises:
            EngineFailedError: it couldn't be loaded.
        """
        ...

    async def warm_up(self) -> None:
        """Run one minimal request as this engine's role runs requests.

        Raises:
            EngineFailedError: it failed or took longer than the engine's warm-up limit.
        """
        ...

    async def load(self) -> EngineLoad:
        """Return the engine's current load."""
        ...

    async def close(self) -> None:
        """Release everything; open requests fail."""
        ...


class Probeable(Protocol):
    """Lets `worker.canary` check whether an engine works, between start and close.

    ``dp_rank`` is below `EngineInfo.dp_size`: one rank can hang while the others go on.
    """

    def progress(self, dp_rank: int) -> int:
        """Return a number that changes whenever the rank makes progress with any request.

        It neither blocks nor sends anything to the rank. It may miss progress, but never invents
        any.
        """
        ...

    async def probe(self, dp_rank: int) -> None:
        """Run one minimal request on a rank, as this engine's role runs requests.

        It queues behind real requests and has no time limit: cancel it to abort the request, which
        takes effect at once even if the engine hangs. One at a time per rank.

        Raises:
            ServingError: it failed.
        """
        ...


async def warm_up_by_probe(engine: Probeable, limit_s: float, *, ranks: int = 1) -> None:
    """Probe each of ``ranks`` ranks, within ``limit_s`` seconds each.

    Raises:
        EngineFailedError: a probe failed or took longer.
    """
    for rank in range(ranks):
        try:
            async with asyncio.timeout(limit_s):
                await engine.probe(rank)
        except TimeoutError as error:
            raise EngineFailedError(f"The warm-up took longer than {limit_s:g} s.") from error
        except ServingError as error:
            raise EngineFailedError(f"The warm-up failed: {error.message}") from error


class Follower(Protocol):
    """An engine's processes that get their requests from another process of the same model.

    Order of calls: `start`, `close`. `close` may be called twice and after a failed start.
    """

    async def start(self, on_end: Callable[[str], None]) -> None:
        """Load this process's part; ``on_end`` is called once if the engine ends later, with why.

        Raises:
            EngineFailedError: it couldn't be loaded.
        """
        ...

    async def close(self) -> None:
        """End the engine's processes."""
        ...


class LoadStage(enum.IntEnum):
    """A part of a worker's start; later ones are greater. The names are the contract's."""

    STARTING = 1
    LOADING_WEIGHTS = 2
    PREPARING = 3
    """Weights are read; the engine allocates its KV cache and prepares kernels."""
    WARMING_UP = 4
    """The first request runs. Known to the worker's host; an engine never says this."""
    READY = 5
    """The worker accepts requests. Known to the worker's host, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far a model is loaded."""

    stage: LoadStage = LoadStage.STARTING
    files_done: int = 0
    """Weight files read whole."""
    files_total: int = 0
    """Weight files in all; 0: not known."""
    bytes_done: int = 0
    """Bytes of weights read, as far as it can be seen."""
    bytes_total: int = 0
    """Bytes of weights in all; 0: not known."""


@runtime_checkable
class LoadObserved(Protocol):
    """An engine whose loading can be watched; optional."""

    def load_progress(self) -> LoadProgress:
        """Return how far it is: STARTING, LOADING_WEIGHTS or PREPARING, with the numbers.

        Called from the event loop at any time, four times a second while the model loads; takes at
        most 5 ms. Numbers may fall: the worker's host reports the greatest so far.
        """
        ...
