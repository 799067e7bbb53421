"""transformers as a `embedding.embedder.Embedder`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from millstream_server.control.engine import EngineLoad, warm_up_by_probe
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.engines.transformers.vector_model import VectorModel, VectorModelConfig
from millstream_server.engines.vectors import as_array, check_length
from millstream_server.runtime.errors import (
    EngineFailedError,
    OverloadedError,
    ServingError,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.threads import DaemonThreads

log = get_log(__name__)

_PROBE = (0,)
_CLOSE_TIMEOUT_S = 10.0


class TransformersEmbedder:
    """Satisfies `embedding.embedder.Embedder`. One thread loads and runs the model."""

    def __init__(self, config: VectorModelConfig) -> None:
        self._config = config
        self._model = VectorModel(config)
        self._thread = DaemonThreads(1, "vectors")
        self._info: EmbedderInfo | None = None
        self._probe: asyncio.Task[NDArray[np.float32]] | None = None
        self._running = self._waiting = self._finished = 0
        self._closed = False

    async def start(self, on_failure: Callable[[ServingError], None]) -> EmbedderInfo:
        """See `Engine.start`. A model that fails later is noticed by its next batch or probe."""
        self._info = await asyncio.wrap_future(self._thread.submit(self._load))
        return self._info

    def _load(self) -> EmbedderInfo:
        try:
            return self._model.load()
        except EngineFailedError:
            raise
        except Exception as error:  # the vendor's seam: anything may come
            log.warning("the model could not be loaded", error=error)
            raise EngineFailedError(
                "The model could not be loaded; the worker's log has the cause."
            ) from error

    async def warm_up(self) -> None:
        await warm_up_by_probe(self, self._config.warm_up_timeout_s)

    def progress(self, dp_rank: int) -> int:
        """Return the number of batches that have ended."""
        return self._finished

    async def probe(self, dp_rank: int) -> None:
        """Run one token through, behind the batches that wait.

        A cancelled probe stays in the queue of a model that hangs; the next one waits for it.
        """
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._run([_PROBE]))
            self._probe.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._probe)

    async def embed(self, inputs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        return await self._run(inputs)

    async def rank(self, pairs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        return await self._run(pairs)

    async def _run(self, inputs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        info = self._started()
        for index, ids in enumerate(inputs):
            check_length(index, ids, info.max_input_tokens)
        stop = threading.Event()
        self._waiting += len(inputs)
        try:
            rows = await asyncio.wrap_future(self._thread.submit(self._batch, inputs, stop))
        except RuntimeError as error:  # the thread was closed meanwhile
            raise EngineFailedError("The engine was closed.") from error
        finally:
            stop.set()
            self._waiting -= len(inputs)
        self._started()  # else the batch may have been left unfinished
        expected = (len(inputs), info.width) if info.embeds else (len(inputs),)
        return as_array(rows, expected)

    def _batch(self, inputs: Sequence[Sequence[int]], stop: threading.Event) -> NDArray[np.float32]:
        """Run inputs, in the model's thread."""
        self._running = len(inputs)
        try:
            return self._model.run(inputs, lambda: self._closed or stop.is_set())
        except ServingError:
            raise
        except Exception as error:  # the vendor's seam: anything may come
            log.warning("the model failed", inputs=len(inputs), error=error)
            if type(error).__name__ == "OutOfMemoryError":
                message = "The engine has too little GPU memory for this batch now."
                raise OverloadedError(message) from error
            raise EngineFailedError("The model failed.") from error
        finally:
            self._running = 0
            self._finished += 1

    def _started(self) -> EmbedderInfo:
        if self._closed:
            raise EngineFailedError("The engine was closed.")
        if self._info is None:
            raise EngineFailedError("The engine has not started.")
        return self._info

    async def load(self) -> EngineLoad:
        """Return the load in inputs; see `Engine.load`."""
        self._started()
        running = min(self._running, self._waiting)
        return EngineLoad(running_requests=running, queued_requests=self._waiting - running)

    async def close(self) -> None:
        """Release the model when the running batch ends; those that wait fail."""
        if self._closed:
            return
        self._closed = True
        released = asyncio.wrap_future(self._thread.submit(self._model.close))
        self._thread.close()
        await asyncio.wait({released}, timeout=_CLOSE_TIMEOUT_S)
        if not released.done():
            log.warning("the model hangs; it is left to the process's end")
