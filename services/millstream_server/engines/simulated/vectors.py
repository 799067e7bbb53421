"""A deterministic embedder and ranker: results to work out by hand, a timing model.

With ``s`` as the sum of ``(place + 1) * (token_id + 1)`` over an input's tokens, the vector of
width ``w`` is ``[1 + s * (d + 1) % 1013 for d in range(w)]``, which has not the length 1, and a
pair's logit is ``s % 2001 / 100 - 10`` as float32. No torch.

It is part of the package: for contract tests, demonstrations and scale tests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millstream_server.control.engine import EngineLoad
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.runtime.errors import EngineFailedError, InvalidRequestError, ServingError

_KEPT_BATCHES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEmbedderConfig:
    """The simulated model."""

    width: int = 16
    dimensions: tuple[int, ...] = (4, 8, 16)
    max_input_tokens: int = 512
    vocab_size: int = 32000
    max_batch_tokens: int = 4096
    max_running_requests: int = 64
    """Inputs of a batch."""
    embeds: bool = True
    ranks: bool = True
    load_s: float = 0.0
    token_s: float = 0.0
    """Seconds of the model per token."""
    answers: bool = False
    """Whether it pretends to rank by its answer."""


def vector(token_ids: Sequence[int], width: int) -> list[float]:
    """Return the vector of an input; see the module's rule. Tests compare the engine with it."""
    total = _sum(token_ids)
    return [float(1 + total * (d + 1) % 1013) for d in range(width)]


def logit(token_ids: Sequence[int]) -> float:
    """Return the score of a pair; see the module's rule."""
    return _sum(token_ids) % 2001 / 100 - 10


def _sum(token_ids: Sequence[int]) -> int:
    return sum((place + 1) * (token + 1) for place, token in enumerate(token_ids))


class SimulatedEmbedder:
    """Satisfies `embedding.embedder.Embedder`. It runs one batch at a time.

    A test sets `fault`, and calls `wedge` and `die`.
    """

    def __init__(self, config: SimulatedEmbedderConfig | None = None) -> None:
        self.config = config or SimulatedEmbedderConfig()
        self.fault: Callable[[Sequence[Sequence[int]]], Exception | None] = lambda _: None
        """Returns the error with which a batch fails, None: it doesn't."""
        self.batches: deque[tuple[int, ...]] = deque(maxlen=_KEPT_BATCHES)
        """The tokens of each input, of the last batches that have begun."""
        self.dropped = 0
        """Inputs whose call was cancelled before its end."""
        self._turn = asyncio.Lock()
        self._going = asyncio.Event()
        self._going.set()
        self._steps = 0
        self._running = 0
        self._waiting = 0
        self._calls: set[asyncio.Task[None]] = set()
        self._failure = "The engine has not started."
        self._on_failure: Callable[[ServingError], None] | None = None

    async def start(self, on_failure: Callable[[ServingError], None]) -> EmbedderInfo:
        config = self.config
        await asyncio.sleep(config.load_s)
        self._on_failure = on_failure
        self._failure = ""
        return EmbedderInfo(
            engine="simulated",
            engine_version="1",
            max_running_requests=config.max_running_requests,
            embeds=config.embeds,
            ranks=config.ranks,
            width=config.width if config.embeds else 0,
            dimensions=config.dimensions if config.embeds else (),
            max_input_tokens=config.max_input_tokens,
            vocab_size=config.vocab_size,
            max_batch_tokens=config.max_batch_tokens,
            answers=config.answers,
        )

    async def warm_up(self) -> None:
        await self.probe(0)

    def progress(self, dp_rank: int) -> int:
        return self._steps

    async def probe(self, dp_rank: int) -> None:
        await self._run([(0,)])

    async def embed(self, inputs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        await self._run(inputs)
        totals = np.array([_sum(ids) for ids in inputs], np.int64)
        places = np.arange(1, self.config.width + 1, dtype=np.int64)
        return (1 + totals[:, np.newaxis] * places % 1013).astype(np.float32)

    async def rank(self, pairs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        await self._run(pairs)
        return np.array([logit(ids) for ids in pairs], np.float32)

    async def _run(self, inputs: Sequence[Sequence[int]]) -> None:
        """Take the model's time; closing and dying end it."""
        if self._failure:
            raise EngineFailedError(self._failure)
        for index, ids in enumerate(inputs):
            if not 0 < len(ids) <= self.config.max_input_tokens:
                raise InvalidRequestError.of(f"inputs[{index}]", f"has {len(ids)} tokens")
        call = asyncio.create_task(self._take_time(inputs))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            await call
        except asyncio.CancelledError:
            self.dropped += len(inputs)
            task = asyncio.current_task()
            if self._failure and not (task and task.cancelling()):
                raise EngineFailedError(self._failure) from None
            raise

    async def _take_time(self, inputs: Sequence[Sequence[int]]) -> None:
        self._waiting += len(inputs)
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= len(inputs)
        self._running = len(inputs)
        try:
            self.batches.append(tuple(map(len, inputs)))
            await asyncio.sleep(self.config.token_s * sum(map(len, inputs)))
            await self._going.wait()
            if (fault := self.fault(inputs)) is not None:
                raise fault
            self._steps += 1
        finally:
            self._running = 0
            self._turn.release()

    async def load(self) -> EngineLoad:
        return EngineLoad(running_requests=self._running, queued_requests=self._waiting)

    def wedge(self) -> None:
        self._going.clear()

    def unwedge(self) -> None:
        self._going.set()

    def die(self) -> None:
        self._fail("The engine behind this worker died.")
        if self._on_failure is not None:
            self._on_failure(EngineFailedError(self._failure))

    def _fail(self, message: str) -> None:
        self._failure = message
        for call in list(self._calls):
            call.cancel()

    async def close(self) -> None:
        self._fail("The worker's engine was closed.")
