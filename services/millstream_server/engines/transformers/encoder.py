"""A `MediaEncoder` around any vision tower."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from millstream_server.control.engine import EngineLoad, warm_up_by_probe
from millstream_server.encode.encoder import EncoderInfo, Prepared
from millstream_server.engines.transformers.preprocessing import Preprocessor
from millstream_server.engines.transformers.tower import Tower, TowerConfig
from millstream_server.media import families
from millstream_server.media.families.family import Family
from millstream_server.media.items import Content, Frames, Modality
from millstream_server.media.tensor import ElementType, Tensor, TensorSpec
from millstream_server.model_files.weights import raw_header
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    OverloadedError,
    ServingError,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.threads import DaemonThreads

log = get_log(__name__)

_CLOSE_TIMEOUT_S = 10.0
_MAX_RUNNING = 32
"""Items at once, encoding or waiting, with which the worker is fully used."""
_SETTINGS = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_SAMPLE_BYTES = 1024
_TOWER_NAMES = ("visual", "vision", "multi_modal_projector")
_PROBE_SIDE = 64
_BLANK = Frames(
    modality=Modality.IMAGE,
    width=_PROBE_SIDE,
    height=_PROBE_SIDE,
    data=memoryview(bytes(3 * _PROBE_SIDE**2)),
)


@dataclass(frozen=True, slots=True)
class _Ready:
    family: Family
    preprocessor: Preprocessor
    info: EncoderInfo


class TowerEncoder:
    """Satisfies `encode.encoder.MediaEncoder`.

    One thread loads and runs the tower, so that batches and probes run one after another and a
    vendor's state is seen from one thread only.
    """

    def __init__(self, config: TowerConfig, tower: Tower) -> None:
        self._config = config
        self._tower = tower
        self._thread = DaemonThreads(1, "vision-tower")
        self._lock = threading.Lock()
        self._waiting = 0
        self._running = 0
        self._finished = 0
        self._ready: _Ready | None = None
        self._probe: asyncio.Future[list[Tensor]] | None = None
        self._closed = False

    async def start(self, on_failure: Callable[[ServingError], None]) -> EncoderInfo:
        """See `Engine.start`. A tower that fails later is noticed by its next batch or probe."""
        self._ready = await asyncio.wrap_future(self._thread.submit(self._load))
        return self._ready.info

    def _load(self) -> _Ready:
        family = self._family()
        try:
            # First: a tower may prepare what its vendor's processors need.
            facts = self._tower.load(family)
            limit = self._config.max_item_tokens
            preprocessor = Preprocessor(family, self._config.model_path, limit)
            digest = settings_digest(self._config.model_path, facts.kind)
        except EngineFailedError:
            raise
        except Exception as error:  # the vendor's seam: anything may come
            message = "The vision tower could not be loaded; the worker's log has the cause."
            log.warning("the vision tower could not be loaded", error=error)
            raise EngineFailedError(message) from error
        info = EncoderInfo(
            engine=facts.engine,
            engine_version=facts.version,
            device=facts.device,
            max_running_requests=_MAX_RUNNING,
            modalities=family.modalities,
            content=self._tower.content,
            settings_digest=digest,
            max_item_tokens=self._config.max_item_tokens,
            sampling=family.sampling,
        )
        return _Ready(family, preprocessor, info)

    def _family(self) -> Family:
        try:
            family = families.load(self._config.model_path)
        except families.UnusableFamilyError as error:
            raise EngineFailedError(f"The model's images can't be encoded: {error}") from error
        if family is None:
            raise EngineFailedError("The model reads text only: it has no vision tower.")
        return family

    async def warm_up(self) -> None:
        await warm_up_by_probe(self, self._config.warm_up_timeout_s)

    def progress(self, dp_rank: int) -> int:
        """Return the number of batches that the tower has finished."""
        return self._finished

    async def probe(self, dp_rank: int) -> None:
        """Encode one blank picture, behind the batches that wait.

        A cancelled probe stays in the queue of a tower that hangs; the next one waits for it.
        """
        if self._probe is not None and not self._probe.done():
            await asyncio.wait({self._probe})
        prepared = await asyncio.to_thread(self.prepare, _BLANK)
        self._probe = asyncio.wrap_future(self._submit([prepared]))
        # Nobody may wait for its result any more.
        self._probe.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
        await asyncio.shield(self._probe)

    async def load(self) -> EngineLoad:
        """Return the items in the tower and before it; it has no blocks."""
        return EngineLoad(running_requests=self._running, queued_requests=self._waiting)

    def prepare(self, frames: Frames) -> Prepared:
        return self._started().preprocessor.prepare(frames)

    def encode(self, batch: Sequence[Prepared]) -> list[Tensor]:
        return self._submit(list(batch)).result() if batch else []

    def _submit(self, batch: list[Prepared]) -> Future[list[Tensor]]:
        ready = self._started()
        with self._lock:
            self._waiting += len(batch)
        try:
            return self._thread.submit(lambda: self._run(ready, batch))
        except RuntimeError as error:  # shut down meanwhile
            with self._lock:
                self._waiting -= len(batch)
            raise EngineFailedError("The encoder was closed.") from error

    def _run(self, ready: _Ready, batch: list[Prepared]) -> list[Tensor]:
        with self._lock:
            self._waiting -= len(batch)
            self._running = len(batch)
        try:
            modality = batch[0].modality
            if any(item.modality is not modality for item in batch):
                raise InternalError("A batch of the encoder mixed images and videos.")
            rows = self._run_tower(modality, batch)
            self._check(ready, rows, batch)
            return [to_tensor(item) for item in rows]
        finally:
            with self._lock:
                self._running = 0
                self._finished += 1

    def _run_tower(self, modality: Modality, batch: list[Prepared]) -> Sequence[Any]:
        if self._closed:
            raise EngineFailedError("The encoder was closed.")
        try:
            return self._tower.run(modality, batch)
        except Exception as error:  # the vendor's seam: anything may come
            log.warning("the vision tower failed", items=len(batch), error=error)
            if type(error).__name__ == "OutOfMemoryError":
                message = "The encoder has too little GPU memory for this batch now."
                raise OverloadedError(message) from error
            raise EngineFailedError("The vision tower failed.") from error

    def _check(self, ready: _Ready, rows: Sequence[Any], batch: list[Prepared]) -> None:
        """A row too few would end the engine that reads them."""
        if len(rows) != len(batch):
            raise InternalError(f"The tower made {len(rows)} results of {len(batch)} items.")
        if self._tower.content is Content.PIXELS:
            return
        for made, item in zip(rows, batch, strict=True):
            wanted = [item.tokens, ready.family.embedding_width]
            if list(made.shape) != wanted:
                message = f"The tower made rows of {list(made.shape)}, expected {wanted}."
                raise InternalError(message)

    def _started(self) -> _Ready:
        if self._closed:
            raise EngineFailedError("The encoder was closed.")
        if self._ready is None:
            raise EngineFailedError("The encoder has not started.")
        return self._ready

    async def close(self) -> None:
        """Release the tower when the running batch ends; those that wait fail."""
        if self._closed:
            return
        self._closed = True
        released = asyncio.wrap_future(self._thread.submit(self._tower.close))
        self._thread.close()
        await asyncio.wait({released}, timeout=_CLOSE_TIMEOUT_S)
        if not released.done():
            log.warning("the vision tower hangs; it is left to the process's end")
        elif (error := released.exception()) is not None:
            log.warning("the vision tower could not be released", error=error)
        self._ready = None


def to_tensor(tensor: Any) -> Tensor:
    """Copy a torch tensor from any device; the copy shares no memory with others."""
    torch: Any = importlib.import_module("torch")
    owned = tensor.detach().to("cpu", copy=True).contiguous()
    spec = TensorSpec(ElementType(str(owned.dtype).removeprefix("torch.")), tuple(owned.shape))
    return Tensor(spec, memoryview(owned.view(torch.uint8).numpy()).cast("B"))


def settings_digest(model_path: Path, kind: str) -> bytes:
    """Return the SHA-256 of what an embedding depends on besides the item.

    Of the weights it covers the files' names, sizes and headers, and the start of every tensor of
    the tower: the whole would take seconds per GB, and training changes all tensors that it changes
    at all.
    """
    hashed = hashlib.sha256(b"millstream.encoder")
    for part in _parts(model_path, kind):
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.digest()


def _parts(model_path: Path, kind: str) -> Iterator[bytes]:
    yield kind.encode()
    for name in _SETTINGS:
        file = model_path / name
        yield name.encode()
        yield file.read_bytes() if file.is_file() else b""
    for file in sorted(model_path.glob("*.safetensors")):
        yield file.name.encode()
        yield file.stat().st_size.to_bytes(8, "big")
        with file.open("rb") as opened:
            yield from _weights(opened)


def _weights(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a safetensors file's header and samples."""
    header = raw_header(file)
    data_at = file.tell()
    yield header
    tensors: dict[str, Any] = json.loads(header)
    for name in sorted(tensors):
        if any(part in name for part in _TOWER_NAMES):
            start, end = tensors[name]["data_offsets"]
            file.seek(data_at + start)
            yield file.read(min(_SAMPLE_BYTES, end - start))
