"""An encode worker in the test's process, on a simulated tower, and its raw stream."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
from PIL import Image

from millstream.v1 import encode_pb2, encode_pb2_grpc, media_pb2
from millstream_server.encode.transfer.store import EmbeddingStore
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.encode.worker.core import EncodeOptions
from millstream_server.encode.worker.pipeline import HostedEncoder, PipelineOptions
from millstream_server.encode.worker.servicer import make_plan
from millstream_server.engines.simulated.encoder import SimulatedEncoder, SimulatedEncoderConfig
from millstream_server.generation.ticket import TicketKey
from millstream_server.media.decoding.pool import DecoderPool
from millstream_server.media.items import Frames, MediaLimits, Modality
from millstream_server.runtime.errors import InvalidRequestError
from millstream_testing.waiting import EOF, until
from tests.support.worker.hosted_worker import HostedWorker, host_settings, hosted_worker

MODEL = "tiny-vision"
IMAGE, VIDEO = media_pb2.MODALITY_IMAGE, media_pb2.MODALITY_VIDEO
KEY = TicketKey(bytes(32))


class Decoders:
    """Decodes images here, without the processes that would take a second to start."""

    def __init__(self) -> None:
        self.going = asyncio.Event()
        self.going.set()
        self.begun = self.decoded = 0

    async def decode(self, data: bytes | memoryview, modality: Modality) -> Frames:
        self.begun += 1
        await self.going.wait()
        self.decoded += 1
        try:
            image = Image.open(io.BytesIO(data)).convert("RGB")
        except OSError as error:
            raise InvalidRequestError.of("data", "is no image") from error
        width, height = image.size
        pixels = memoryview(image.tobytes())
        return Frames(modality=modality, width=width, height=height, data=pixels)

    async def close(self) -> None:
        self.going.set()


@dataclass
class Setup:
    """What a test may change."""

    tower: SimulatedEncoderConfig = field(default_factory=SimulatedEncoderConfig)
    limits: MediaLimits = field(default_factory=MediaLimits)
    store_bytes: int = 1 << 20
    options: EncodeOptions = field(default_factory=EncodeOptions)
    batch_patches: int = 16384
    decoders: Decoders | None = field(default_factory=Decoders)
    """None: the service's own."""

    def hosted(self, tower: SimulatedEncoder) -> HostedEncoder:
        options = PipelineOptions(
            limits=self.limits, decoders=1, prepare_threads=1, batch_patches=self.batch_patches
        )
        if self.decoders is not None:
            made = self.decoders
            options = replace(options, make_decoders=lambda *_: cast("DecoderPool", made))
        store = EmbeddingStore(self.store_bytes)
        return HostedEncoder(tower, store, options)

    @property
    def serving(self) -> EncodeOptions:
        return replace(self.options, tickets=EmbeddingTickets(KEY))


@dataclass(kw_only=True)
class Encoder(HostedWorker):
    """A worker that runs here."""

    tower: SimulatedEncoder
    hosted: HostedEncoder
    decoders: Any

    @property
    def pinned_bytes(self) -> int:
        return self.hosted.store.pinned_bytes


class Stream:
    """One Encode stream, at the level of its messages."""

    def __init__(self, channel: Any) -> None:
        method: Any = encode_pb2_grpc.EncodeServiceStub(channel).Encode
        self.call = method()
        self.responses: list[encode_pb2.EncodeResponse] = []
        self.ended: grpc.aio.AioRpcError | None = None
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            while (response := await self.call.read()) is not EOF:
                self.responses.append(response)
        except grpc.aio.AioRpcError as error:
            self.ended = error

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.wait({self._task})

    async def start(self, slot: int, file: bytes, **changes: Any) -> None:
        """Start an image, inline unless told otherwise."""
        given: dict[str, Any] = {"modality": IMAGE, "total_bytes": len(file), "data": file}
        await self.send(start=encode_pb2.EncodeItem(slot=slot, **(given | changes)))

    async def announce(self, slot: int, file: bytes, **changes: Any) -> None:
        """Start an image by its digest."""
        await self.start(slot, file, **({"data": b"", "sha256": sha256(file)} | changes))

    async def more(self, slot: int, data: bytes) -> None:
        await self.send(more=encode_pb2.EncodeBytes(slot=slot, data=data))

    async def cancel(self, slot: int) -> None:
        await self.send(cancel=encode_pb2.CancelItem(slot=slot))

    async def release(self, lease: str) -> None:
        await self.send(release=encode_pb2.ReleaseLease(lease=lease))

    async def send(self, **control: Any) -> None:
        await self.call.write(encode_pb2.EncodeRequest(**control))

    @property
    def wanted(self) -> list[int]:
        return [slot for response in self.responses for slot in response.wanted]

    def ends(self, slot: int) -> list[Any]:
        """Return the slot's terminal entries: EmbeddingRef or RequestError."""
        return [
            *(e.ref for r in self.responses for e in r.encoded if e.slot == slot),
            *(e.error for r in self.responses for e in r.errors if e.slot == slot),
        ]

    async def end(self, slot: int) -> Any:
        await until(lambda: bool(self.ends(slot)))
        (end,) = self.ends(slot)
        return end

    async def encoded(self, slot: int) -> encode_pb2.EmbeddingRef:
        end = await self.end(slot)
        assert isinstance(end, encode_pb2.EmbeddingRef), end
        return end

    async def error(self, slot: int) -> tuple[str, list[str], str]:
        """Return the reason, the fields and the message of a slot's failure."""
        end = await self.end(slot)
        assert not isinstance(end, encode_pb2.EmbeddingRef), end
        reason = end.DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_number[end.reason].name
        return (
            reason.removeprefix("ERROR_REASON_"),
            [violation.field for violation in end.violations],
            end.message,
        )


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@contextlib.asynccontextmanager
async def encode_worker(setup: Setup | None = None, **changes: Any) -> AsyncIterator[Encoder]:
    """Run a worker; ``changes`` are of its host's settings."""
    setup = setup or Setup()
    tower = SimulatedEncoder(setup.tower)
    hosted = setup.hosted(tower)
    settings = host_settings(**changes)
    plan = make_plan(hosted, MODEL, setup.serving)
    async with hosted_worker(settings, plan, tower.unwedge) as running:
        yield Encoder(tower=tower, hosted=hosted, decoders=setup.decoders, **running)


@contextlib.asynccontextmanager
async def encode_stream(one: Encoder) -> AsyncIterator[Stream]:
    """Open a stream to a worker."""
    stream = Stream(one.channel)
    try:
        yield stream
    finally:
        await stream.close()


@contextlib.asynccontextmanager
async def streaming(
    setup: Setup | None = None, **changes: Any
) -> AsyncIterator[tuple[Encoder, Stream]]:
    """Run a worker and open a stream to it."""
    async with encode_worker(setup, **changes) as one, encode_stream(one) as stream:
        yield one, stream
