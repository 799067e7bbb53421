"""From a file's bytes to a tensor in the store, and the engine that a worker's host sees of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from millstream_server.control.engine import EngineLoad
from millstream_server.encode.encoder import EncoderInfo, MediaEncoder, Prepared
from millstream_server.encode.shared_work import SharedWork
from millstream_server.encode.transfer.store import EmbeddingStore, Stored
from millstream_server.encode.worker.batcher import EncodeStage, EncodeStages, ItemBatcher
from millstream_server.media.decoding.pool import DecoderPool
from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.items import (
    Content,
    EncodedItem,
    MediaFile,
    MediaLimits,
    Modality,
)
from millstream_server.media.tensor import Tensor
from millstream_server.runtime.errors import InternalError, ServingError, UnavailableError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.threads import DaemonThreads
from millstream_server.worker.host import WrappedEngine

log = get_log(__name__)

T = TypeVar("T")


MakeDecoders = Callable[[MediaLimits, int, FrameSampling], DecoderPool]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How much runs at once."""

    limits: MediaLimits = field(default_factory=MediaLimits)
    decoders: int = 2
    prepare_threads: int = 2
    running_items: int = 32
    """Items at once that use the worker fully, if its encoder doesn't know."""
    batch_patches: int = 16384
    make_decoders: MakeDecoders = DecoderPool
    """Makes what decodes, from the limits, the number of processes and the model's sampling."""


class Pipeline:
    """Decodes, prepares and encodes files, and puts the results in a store. For one event loop."""

    def __init__(
        self,
        encoder: MediaEncoder,
        info: EncoderInfo,
        store: EmbeddingStore,
        options: PipelineOptions,
    ) -> None:
        self.store = store
        self._encoder = encoder
        self._info = info
        self._limits = options.limits
        self._decoders = options.make_decoders(options.limits, options.decoders, info.sampling)
        self._prepare_threads = DaemonThreads(options.prepare_threads, "prepare")
        self.batcher = ItemBatcher(encoder.encode, options.batch_patches)
        # A few more than the processes: while one item is prepared, the next one is decoded.
        self._turns = asyncio.Semaphore(options.decoders + options.prepare_threads)
        self._making: SharedWork[bytes, Stored] = SharedWork(store.unpin)

    def digest(self, file: MediaFile) -> bytes:
        """Return the digest of the result, from the SHA-256 of the file's bytes."""
        kind = file.modality.value
        if file.modality is Modality.VIDEO:  # the frames that are read are part of the result
            limits = self._limits
            kind += f" {self._info.sampling.value} {limits.fps} {limits.max_frames}"
        hashed = hashlib.sha256(b"millstream.v1.embedding")
        for part in (self._info.settings_digest, file.sha256, kind.encode(), file.salt.encode()):
            hashed.update(len(part).to_bytes(8, "big") + part)
        return hashed.digest()

    def being_made(self, digest: bytes) -> bool:
        """Return whether `encode` wouldn't need the file's bytes."""
        return digest in self._making

    async def encode(
        self, digest: bytes, file: MediaFile, stages: EncodeStages, take: Callable[[Stored], T]
    ) -> T:
        """Encode ``file``, or wait for the one who does so already; return what ``take`` does.

        The tensor stays in the store while ``take`` runs, which pins it. Cancelling stops the work
        when nobody else waits for it.

        Raises:
            ServingError: it can't be encoded.
        """
        async with self._making.result(digest, lambda: self._make(digest, file, stages)) as stored:
            return take(stored)

    async def close(self) -> None:
        self._making.cancel()
        await self._decoders.close()
        self._prepare_threads.close()
        self.batcher.close()

    async def _make(self, digest: bytes, file: MediaFile, stages: EncodeStages) -> Stored:
        """Return the result, pinned."""
        async with self._turn(stages):
            prepared = await self._prepared(file, stages)
        tensor = await self.batcher.run(prepared, stages)
        self._check(prepared, tensor)
        item = EncodedItem(
            modality=prepared.modality,
            digest=digest,
            tokens=prepared.tokens,
            geometry=prepared.geometry,
            tensor=tensor.spec,
            content=self._info.content,
            lease="",
        )
        stored = await self.store.put_in_steps(digest, tensor, item)
        self.store.pin(stored)
        return stored

    @contextlib.asynccontextmanager
    async def _turn(self, stages: EncodeStages) -> AsyncIterator[None]:
        """Bound what is decoded and prepared at once: pixels take much more memory than files."""
        began = time.monotonic()
        async with self._turns:
            await self.batcher.room()
            stages.add(EncodeStage.QUEUE, time.monotonic() - began)
            yield

    async def _prepared(self, file: MediaFile, stages: EncodeStages) -> Prepared:
        with stages.timed(EncodeStage.DECODE):
            frames = await self._decoders.decode(file.data, file.modality)
        with stages.timed(EncodeStage.PREPARE):
            preparing = self._prepare_threads.submit(self._encoder.prepare, frames)
            return await asyncio.wrap_future(preparing)

    def _check(self, prepared: Prepared, tensor: Tensor) -> None:
        """Check an encoder's result: a wrong one would break a request on another worker."""
        rows = self._info.content is Content.ROWS
        if tensor.spec.problem() or (rows and tensor.spec.shape[0] != prepared.tokens):
            shape = list(tensor.spec.shape)
            fault: ServingError = InternalError.with_id()
            log.error(
                "the encoder's result doesn't fit its item",
                error_id=fault.error_id,
                tokens=prepared.tokens,
                shape=shape,
            )
            raise fault


class HostedEncoder(WrappedEngine):
    """The engine that a worker's host sees; `pipeline` encodes."""

    def __init__(
        self, encoder: MediaEncoder, store: EmbeddingStore, options: PipelineOptions
    ) -> None:
        """Use ``encoder`` and ``store`` alone; `close` closes them."""
        super().__init__(encoder)
        self.store = store
        self.info: EncoderInfo | None = None
        """Its facts; None before `start`."""
        self._encoder = encoder
        self._options = options
        self._pipeline: Pipeline | None = None
        self._closed = False
        self.open_items: Callable[[], int] = lambda: 0
        """Returns how many items are open, for load reports."""
        self.before_store_closes: Callable[[], None] = lambda: None
        """Called when the pipeline has stopped."""

    @property
    def pipeline(self) -> Pipeline:
        """What encodes.

        Raises:
            UnavailableError: the model is still being loaded.
        """
        if self._pipeline is None:
            raise UnavailableError("this worker is still loading its model", retry_delay_s=1.0)
        return self._pipeline

    async def start(self, on_failure: Callable[[ServingError], None]) -> EncoderInfo:
        info = await self._encoder.start(on_failure)
        at_once = info.max_running_requests or self._options.running_items
        self.info = info = replace(info, limits=self._options.limits, max_running_requests=at_once)
        self._pipeline = Pipeline(self._encoder, info, self.store, self._options)
        return info

    async def load(self) -> EngineLoad:
        running = self._pipeline.batcher.running if self._pipeline else 0
        return EngineLoad(
            running_requests=running,
            queued_requests=max(0, self.open_items() - running),
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._pipeline:
                await self._pipeline.close()
            self.before_store_closes()
        finally:
            await self._encoder.close()
            self.store.close()
