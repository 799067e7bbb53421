"""Replaces SGLang's weights; each answer is made by one version, and a failure leaves the old."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millstream_server.control.operations import (
    BroadcastWeights,
    DiskWeights,
    IpcWeights,
    Progress,
    TensorWeights,
    WeightSource,
)
from millstream_server.engines.checkpoint import Checkpoint
from millstream_server.engines.gate import Hold
from millstream_server.engines.operations import check_disk, check_files
from millstream_server.engines.sglang.control import sources
from millstream_server.engines.sglang.control.controlled import ControlledEngine
from millstream_server.engines.sglang.control.sources import UpdateFailedError
from millstream_server.runtime.errors import EngineFailedError, InvalidWeightsError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


class SglangWeights:
    """See `control.operations.WeightControl`.

    SGLang loads what it gets into the tensors that it computes with. A failure half-way leaves a
    mixture: then the last checkpoint is loaded again, or, where the weights came from a trainer and
    are in no file, the engine is given up.
    """

    def __init__(self, engine: ControlledEngine, loaded: Checkpoint) -> None:
        """``loaded`` is what the engine has loaded at its start."""
        self._engine = engine
        self._loaded = loaded
        self._version = engine.info.weight_version
        self._on_disk: Path | None = loaded.path
        """The checkpoint that the weights are; None: they are in no file."""

    async def check_weights(self, source: WeightSource, progress: Progress) -> None:
        match source:
            case DiskWeights(path):
                await check_disk(path, self._loaded, progress)
            case TensorWeights():
                sources.check_tensors(self._engine, source, self._loaded)
            case BroadcastWeights():
                await sources.check_broadcast(self._engine, source, self._loaded)
            case IpcWeights():
                sources.check_ipc(self._engine)

    async def update_weights(self, source: WeightSource, version: str) -> None:
        engine = self._engine
        async with engine.runs.gate.closed(Hold.UPDATING):
            if isinstance(source, DiskWeights):
                # Once more, in milliseconds: files may have changed.
                await asyncio.to_thread(check_files, source.path, self._loaded)
            await engine.flush_cache()
            try:
                await self._apply(source, version)
            except UpdateFailedError as error:
                log.error("the weights weren't updated", reason=str(error), mixed=error.mixed)
                if error.mixed:
                    await self._restore()
                message = "SGLang couldn't load the weights; the old ones are in place."
                raise InvalidWeightsError(message) from error
            self._on_disk = source.path if isinstance(source, DiskWeights) else None
            self._version = version

    async def _apply(self, source: WeightSource, version: str) -> None:
        match source:
            case DiskWeights(path):
                await sources.from_disk(self._engine, path, version)
            case TensorWeights():
                await sources.from_tensors(self._engine, source, version)
            case BroadcastWeights():
                await sources.from_broadcast(self._engine, source, version)
            case IpcWeights():
                await sources.from_ipc(self._engine, source, version)

    async def _restore(self) -> None:
        """Load the old weights again.

        Raises:
            EngineFailedError: they can't be; the worker must restart.
        """
        lost = "the old weights are in no file"
        if self._on_disk is not None:
            try:
                await sources.from_disk(self._engine, self._on_disk, self._version)
            except UpdateFailedError as error:
                lost = str(error)
            else:
                return
        self._engine.lifetime.lose(f"its weights are a mixture: {lost}")
        raise EngineFailedError(
            "The update failed half-way, and the old weights can't be restored."
        )
