"""How a worker encodes an item: check it, admit it, find or make its result, lease it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from millstream_server.encode.encoder import EncoderInfo
from millstream_server.encode.transfer.settings import Transfer
from millstream_server.encode.transfer.store import Lease, Leases, Stored
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.encode.worker.batcher import EncodeStage, EncodeStages
from millstream_server.encode.worker.pipeline import HostedEncoder, Pipeline
from millstream_server.media.items import EncodedItem, MediaFile
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import InvalidRequestError, UnavailableError
from millstream_server.runtime.request_id import check_length
from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.rpc.slot_session import Output
from millstream_server.runtime.telemetry import metrics
from millstream_server.worker.open_requests import OpenRequests

MAX_CHUNK_BYTES = 2 << 20
_SHA256_BYTES = 32
_HASH_HERE_BYTES = 256 << 10
"""A larger file is hashed in a thread: the event loop would wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOptions:
    """How EncodeService serves; what files may be is in the encoder's info."""

    max_upload_bytes: int = 1 << 30
    """Most bytes of files that are held at once."""
    upload_idle_s: float = 10.0
    """Longest wait for the next bytes of a file."""
    lease_s: float = 300.0
    """A result that isn't fetched for so long may be dropped."""
    tickets: EmbeddingTickets | None = None
    """Checks who may fetch; None: nobody may, the results are for this process itself."""
    transfer: Transfer = Transfer.AUTO


class ItemUpload:
    """A file that is here, or comes in chunks after `received` has asked for it."""

    def __init__(self, total_bytes: int, data: bytes | memoryview, idle_s: float) -> None:
        """Take ``data`` for the whole file; if it is empty, chunks must come within ``idle_s``."""
        self.total_bytes = total_bytes
        self.here = bool(data)
        """Whether the file came with the start."""
        self._data = memoryview(data)
        self._idle_s = idle_s
        self._wanted = False
        self._buffer = memoryview(b"")
        self._filled = 0
        self._came = asyncio.Event()

    def more(self, data: bytes) -> None:
        """Take the next chunk.

        Raises:
            InvalidRequestError: it breaks the rules; the item fails.
        """
        if not self._wanted:
            raise InvalidRequestError.of("data", "bytes came that the worker hadn't asked for")
        if not 0 < len(data) <= MAX_CHUNK_BYTES:
            sentence = f"a message has {len(data)} bytes of it; send 1 to {MAX_CHUNK_BYTES}"
            raise InvalidRequestError.of("data", sentence)
        end = self._filled + len(data)
        if end > self.total_bytes:
            sentence = f"is {self.total_bytes}, but at least {end} bytes came"
            raise InvalidRequestError.of("total_bytes", sentence)
        self._buffer[self._filled : end] = data
        self._filled = end
        self._came.set()

    async def received(self, want: Callable[[], None]) -> memoryview:
        """Return the whole file; ``want`` asks the caller for it, if it isn't here.

        Raises:
            UnavailableError: no chunk came for too long.
        """
        if self.here:
            return self._data
        self._wanted, self._buffer = True, memoryview(bytearray(self.total_bytes))
        want()
        while self._filled < self.total_bytes:
            self._came.clear()
            try:
                async with asyncio.timeout(self._idle_s):
                    await self._came.wait()
            except TimeoutError as error:
                raise UnavailableError(
                    f"only {self._filled} of {self.total_bytes} bytes came, and none for "
                    f"{self._idle_s:g} s; send the item again"
                ) from error
        return self._buffer.toreadonly()


class UploadBytes(Ledger):
    """The bytes of all files that are held at once."""

    def __init__(self, max_bytes: int) -> None:
        """Allow ``max_bytes``; one larger file may be held alone."""
        super().__init__(
            max_bytes,
            busy="the worker is busy: a file of {amount} bytes and the {used} bytes that it holds "
            "would exceed {most}; retry later",
        )

    @contextlib.contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Hold a file during the ``with`` block.

        Raises:
            OverloadedError: others leave no room for it.
        """
        if self.used:
            self.take(nbytes)
        else:
            self.used = nbytes
        metrics.ENCODE_UPLOAD_BYTES.inc(nbytes)
        try:
            yield
        finally:
            self.give_back(nbytes)
            metrics.ENCODE_UPLOAD_BYTES.dec(nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class EncodeRequest:
    """An item on a stream."""

    file: MediaFile
    """``data`` is what came of it with its start."""
    upload: ItemUpload
    owner: object
    """Whose lease it gets: the stream."""

    @property
    def deadline_s(self) -> float | None:
        return self.file.deadline_s


@dataclass(frozen=True, slots=True)
class LeasedItem:
    """An item's result, and the lease that keeps it."""

    item: EncodedItem
    lease: Lease


class EncodeWorker:
    """Encodes items on one encoder."""

    def __init__(
        self,
        engine: HostedEncoder,
        requests: OpenRequests,
        streams: OpenWork,
        options: EncodeOptions,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self.work = requests.work
        self.streams = streams
        self.upload_idle_s = options.upload_idle_s
        self._uploads = UploadBytes(options.max_upload_bytes)
        self.leases = Leases(engine.store, options.lease_s, self._lease_ended)
        engine.open_items = lambda: requests.count
        metrics.ENCODE_STORE_BYTES.set_function(lambda: engine.store.used_bytes)

    async def run(self, item: EncodeRequest, output: Output[None]) -> LeasedItem:
        """Find or make the item's result, and lease it; cancel it to stop.

        An entry in ``output`` asks the caller for the item's bytes.

        Raises:
            UnavailableError: the model is still loading.
            InvalidRequestError: the item can't be encoded.
            OverloadedError: a limit on open items would be exceeded.
            ServingError: it isn't encoded.
        """
        file, upload = item.file, item.upload
        with self._requests.running(file.request_id, file.trace, output) as opened:
            pipeline, stages = self._engine.pipeline, EncodeStages()
            if self._engine.info is not None:
                _check(file, upload.total_bytes, self._engine.info)
            self._requests.check(0)
            opened.admit(0)
            if not upload.here and self._known(pipeline, file):
                leased = await self._result(pipeline, item, stages)
            else:
                with self._uploads.hold(upload.total_bytes):
                    with stages.timed(EncodeStage.UPLOAD):
                        data = await upload.received(lambda: output.latest(None))
                    file = replace(file, data=data, sha256=await _verified(file.sha256, data))
                    leased = await self._result(pipeline, replace(item, file=file), stages)
            opened.attributes = {
                **stages.attributes(),
                "millstream.encode.tokens": leased.item.tokens,
                "millstream.encode.cached": leased.item.cached,
            }
            return leased

    def _lease(self, stored: Stored, owner: object) -> Lease:
        """Lease a result; it counts as open work, so that a drain waits until it is fetched."""
        lease = self.leases.grant(stored, owner)
        self.work.begin()
        metrics.ENCODE_LEASES.inc()
        return lease

    def _lease_ended(self) -> None:
        self.work.end()
        metrics.ENCODE_LEASES.dec()

    def _known(self, pipeline: Pipeline, file: MediaFile) -> bool:
        """Return whether the result is there, or being made: its bytes aren't needed then."""
        digest = pipeline.digest(file)
        return pipeline.being_made(digest) or self._engine.store.get(digest) is not None

    async def _result(
        self, pipeline: Pipeline, item: EncodeRequest, stages: EncodeStages
    ) -> LeasedItem:
        digest = pipeline.digest(item.file)
        stored = self._engine.store.get(digest)
        if stored is not None:
            metrics.ENCODE_LOOKUPS.labels("hit").inc()
            return _encoded(self._lease(stored, item.owner), cached=True)
        joins = pipeline.being_made(digest)
        metrics.ENCODE_LOOKUPS.labels("joined" if joins else "miss").inc()
        take = partial(self._lease, owner=item.owner)
        return _encoded(await pipeline.encode(digest, item.file, stages, take), cached=joins)


def _encoded(lease: Lease, *, cached: bool) -> LeasedItem:
    item: EncodedItem = lease.stored.item
    return LeasedItem(replace(item, lease=lease.name, cached=cached), lease)


def _check(file: MediaFile, total_bytes: int, info: EncoderInfo) -> None:
    check_length(file.request_id)
    for field, problem in _problems(file, total_bytes, info):
        raise InvalidRequestError.of(field, problem)


def _problems(file: MediaFile, total_bytes: int, info: EncoderInfo) -> Iterator[tuple[str, str]]:
    """Yield the fields of an item's start that are wrong, and why."""
    most = info.limits.max_item_bytes
    if file.modality not in info.modalities:
        can = " and ".join(sorted(f"{modality.value}s" for modality in info.modalities))
        yield "modality", f"this worker encodes {can} only"
    if not 0 < total_bytes <= most:
        yield "total_bytes", f"is {total_bytes}; 1 to {most} are allowed"
    if file.data and len(file.data) != total_bytes:
        yield "total_bytes", f"is {total_bytes}, but `data` has {len(file.data)} bytes"
    if file.sha256 and len(file.sha256) != _SHA256_BYTES:
        yield "sha256", f"has {len(file.sha256)} bytes; it must have {_SHA256_BYTES}"
    if not file.data and not file.sha256:
        yield "sha256", "is required when `data` is empty"


async def _verified(claimed: bytes, data: memoryview) -> bytes:
    """Return the SHA-256 of ``data``.

    Raises:
        InvalidRequestError: ``claimed`` is another one.
    """
    if len(data) <= _HASH_HERE_BYTES:
        found = hashlib.sha256(data).digest()
    else:
        found = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
    if claimed and claimed != found:
        sentence = "is not that of the bytes that came: they changed on the way; send them again"
        raise InvalidRequestError.of("sha256", sentence)
    return found
