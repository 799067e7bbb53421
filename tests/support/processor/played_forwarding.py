"""Diffusion and embedding workers that do what a test tells them, and one side of a slot stream."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from millstream.v1 import (
    diffusion_pb2,
    diffusion_pb2_grpc,
    embedding_pb2,
    embedding_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from millstream_server.runtime.errors import FieldViolation, InvalidRequestError
from millstream_server.runtime.rpc.channel import MAX_WORKER_MESSAGE_BYTES
from millstream_server.runtime.rpc.status import to_trailers
from millstream_testing.waiting import EOF, until
from tests.support.worker.without_optional_rpcs import WorkerWithoutOptionalRpcs

Image = diffusion_pb2.GenerateImageResponse
DRAWING = worker_pb2.DiffusionModelInfo(
    images=True,
    default_width=64,
    default_height=64,
    size_step=8,
    min_size=8,
    max_pixels=256 * 256,
    default_steps=4,
    max_steps=20,
    default_guidance_scale=4,
    max_outputs=4,
    max_prompt_tokens=64,
    schedulers=["euler", "ddim"],
    image_to_image=True,
)
EMBEDDING = worker_pb2.EmbeddingModelInfo(
    embeds=True, width=4, dimensions=[2, 3], max_input_tokens=16
)
RANKING = worker_pb2.EmbeddingModelInfo(ranks=True, max_input_tokens=24)


class _Worker(WorkerWithoutOptionalRpcs):
    """Says what it is, once."""

    def __init__(self, info: worker_pb2.WorkerInfo) -> None:
        self.info = info

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb2.GetWorkerInfoResponse:
        return worker_pb2.GetWorkerInfoResponse(info=self.info)

    async def WatchWorkerInfo(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not served here")
        yield

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not served here")
        yield


class PlayedDiffuser(_Worker, diffusion_pb2_grpc.DiffusionServiceServicer):
    """Sends what the test puts in; each request's file is `image_of` its seed."""

    def __init__(self, model: str = "drawing", at_once: int = 1, **info: Any) -> None:
        model_info = worker_pb2.DiffusionModelInfo()
        model_info.CopyFrom(DRAWING)
        for name, value in info.items():
            setattr(model_info, name, value)
        super().__init__(
            worker_pb2.WorkerInfo(
                role=worker_pb2.WORKER_ROLE_DIFFUSION,
                model=model,
                engine="played",
                max_running_requests=at_once,
                diffusion_model=model_info,
            )
        )
        self.starts: list[Any] = []
        self.cancels: list[int] = []
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()

    async def GenerateText(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        raise NotImplementedError("it makes images")

    async def GenerateImage(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await self._serve(context)

    async def GenerateVideo(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await self._serve(context)

    async def _serve(self, context: Any) -> None:
        reader = asyncio.ensure_future(self._read(context))
        try:
            while (response := await self.outbox.get()) is not None:
                await context.write(response)
        finally:
            reader.cancel()

    async def _read(self, context: Any) -> None:
        while (message := await context.read()) is not EOF:
            if message.HasField("start"):
                self.starts.append(message.start)
            else:
                self.cancels.append(message.cancel.slot)

    async def started(self, count: int = 1) -> Any:
        """Wait for so many requests in all; return the last."""
        await until(lambda: len(self.starts) >= count)
        return self.starts[-1]

    def say(self, **parts: Any) -> None:
        """Send a message."""
        self.outbox.put_nowait(Image(**parts))

    def progress(self, slot: int, **progress: Any) -> None:
        self.say(progress=[diffusion_pb2.DiffusionProgress(slot=slot, **progress)])

    def finish(self, start: Any, data: bytes = b"") -> None:
        """Send a request's outputs and its end."""
        data = data or image_of(start.options.seed)
        half = len(data) // 2
        pieces = [(data[:half], False), (data[half:], True)]
        self.say(
            chunks=[
                diffusion_pb2.OutputChunk(slot=start.slot, data=piece, last=last)
                for piece, last in pieces
            ]
        )
        options = start.options
        self.say(finished=[
            diffusion_pb2.DiffusionFinished(
                slot=start.slot,
                request_id=start.request_id,
                settings=diffusion_pb2.DiffusionSettings(
                    model=start.model,
                    width=options.width,
                    height=options.height,
                    steps=options.steps,
                    seed=options.seed,
                ),
                outputs=[
                    diffusion_pb2.DiffusionOutput(
                        seed=options.seed, total_bytes=len(data), media_type="image/png"
                    )
                ],
                usage=diffusion_pb2.DiffusionUsage(steps=options.steps, prompt_tokens=3),
            )
        ])  # fmt: skip


def image_of(seed: int) -> bytes:
    """Return the bytes of a file that doesn't exist elsewhere."""
    return b"\x89PNG" + struct.pack(">Q", seed) * 32


class PlayedEmbedder(_Worker, embedding_pb2_grpc.EmbeddingServiceServicer):
    """Embeds at once, while `free` is set: a vector is made of its ids, `vector_of`."""

    def __init__(
        self,
        model: str = "embedder",
        info: worker_pb2.EmbeddingModelInfo = EMBEDDING,
        vocab_size: int = 440,
    ) -> None:
        super().__init__(
            worker_pb2.WorkerInfo(
                role=worker_pb2.WORKER_ROLE_EMBEDDING,
                model=model,
                engine="played",
                max_running_requests=2,
                vocab_size=vocab_size,
                embedding_model=info,
            )
        )
        self.starts: list[embedding_pb2.StartEmbed] = []
        self.cancels: list[int] = []
        self.reranks: list[embedding_pb2.RerankRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.left_s: list[float | None] = []
        self.cancelled = 0
        self.refuses: list[tuple[str, str]] = []
        self.free = asyncio.Event()
        self.free.set()
        self._writing = asyncio.Lock()

    async def Embed(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        async with asyncio.TaskGroup() as group:
            while (message := await context.read()) is not EOF:
                if message.HasField("start"):
                    self.starts.append(message.start)
                    group.create_task(self._embed(message.start, context))
                else:
                    self.cancels.append(message.cancel.slot)

    async def _embed(self, start: embedding_pb2.StartEmbed, context: Any) -> None:
        await self.free.wait()
        numbers = start.dimensions or self.info.embedding_model.width
        response = embedding_pb2.EmbedResponse()
        for index, part in reversed(list(enumerate(start.inputs))):  # in any order
            values = pack(vector_of(part.token_ids.ids, numbers))
            response.vectors.add(
                slot=start.slot, indices=[index], dimensions=numbers, values=values
            )
        response.finished.add(
            slot=start.slot, request_id=start.request_id
        ).usage.input_tokens = sum(len(part.token_ids.ids) for part in start.inputs)
        async with self._writing:
            await context.write(response)

    async def Rerank(self, request: Any, context: Any) -> embedding_pb2.RerankResponse:
        self.reranks.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.left_s.append(context.time_remaining())
        if self.refuses:
            error = InvalidRequestError.of_all([FieldViolation(*one) for one in self.refuses])
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message, to_trailers(error))
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        ranked = sorted(
            ((logit_of(pair.ids), index) for index, pair in enumerate(request.pairs)),
            key=lambda found: (-found[0], found[1]),
        )[: request.top_n or None]
        response = embedding_pb2.RerankResponse(request_id=request.request_id)
        for logit, index in ranked:
            response.results.add(index=index, logit=logit, score=1 / (1 + math.exp(-logit)))
        response.usage.input_tokens = sum(len(pair.ids) for pair in request.pairs)
        return response


def vector_of(ids: Sequence[int], numbers: int = 4) -> list[float]:
    """Return the played vector of an input."""
    return [float(len(ids)), float(sum(ids)), float(ids[0]), float(ids[-1])][:numbers]


def pack(numbers: Sequence[float]) -> bytes:
    """Return numbers as they are sent."""
    return struct.pack(f"<{len(numbers)}f", *numbers)


def logit_of(ids: Sequence[int]) -> float:
    """Return the played logit of a pair."""
    return (sum(ids) % 97) / 10 - 4


@contextlib.asynccontextmanager
async def played(worker: Any) -> AsyncIterator[str]:
    """Serve a worker; yields its address."""
    async with restartable(worker) as (address, _):
        yield address


@contextlib.asynccontextmanager
async def restartable(worker: Any) -> AsyncIterator[tuple[str, Callable[[], Any]]]:
    """Serve a worker; yields its address, and what ends it."""
    limit = ("grpc.max_receive_message_length", MAX_WORKER_MESSAGE_BYTES)
    server = grpc.aio.server(options=[limit])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    if isinstance(worker, PlayedDiffuser):
        diffusion_pb2_grpc.add_DiffusionServiceServicer_to_server(worker, server)
    else:
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", lambda: server.stop(0)
    finally:
        await server.stop(0)


class SlotClient:
    """A client's side of one slot stream: what came, by slot."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.progress: dict[int, list[Any]] = {}
        self.files: dict[int, bytes] = {}
        self.vectors: dict[int, dict[int, bytes]] = {}
        self.finished: dict[int, Any] = {}
        self.errors: dict[int, Any] = {}
        self.draining = False
        self.reader: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Start to read."""
        self.reader = asyncio.ensure_future(self.read())

    async def send(self, message: Any) -> None:
        await self.call.write(message)

    async def read(self) -> None:
        """Read to the stream's end."""
        while (response := await self.call.read()) is not EOF:
            self._take(response)

    def _take(self, response: Any) -> None:
        for entry in getattr(response, "progress", ()):
            self.progress.setdefault(entry.slot, []).append(entry)
        for chunk in getattr(response, "chunks", ()):
            self.files[chunk.slot] = self.files.get(chunk.slot, b"") + chunk.data
        for vectors in getattr(response, "vectors", ()):
            width = 4 * vectors.dimensions
            for at, index in enumerate(vectors.indices):
                value = vectors.values[at * width : (at + 1) * width]
                assert self.vectors.setdefault(vectors.slot, {}).setdefault(index, value) is value
        for end in response.finished:
            assert end.slot not in self.finished
            self.finished[end.slot] = end
        for error in response.errors:
            assert error.slot not in self.errors
            self.errors[error.slot] = error.error
        self.draining = self.draining or response.draining

    async def end_of(self, slot: int) -> Any:
        """Wait for a slot's good end."""
        await until(lambda: slot in self.finished or slot in self.errors)
        assert slot in self.finished, self.errors.get(slot)
        return self.finished[slot]

    async def error_of(self, slot: int) -> Any:
        """Wait for a slot's failure."""
        await until(lambda: slot in self.finished or slot in self.errors)
        assert slot in self.errors
        return self.errors[slot]

    def positions(self, slot: int) -> list[int]:
        """Return the queue positions that were told."""
        return [entry.queue_position for entry in self.progress.get(slot, ())]

    async def close(self) -> None:
        """Close the client's side and read to the end."""
        await self.call.done_writing()
        if self.reader is not None:
            await self.reader


@contextlib.asynccontextmanager
async def slots(call: Any, *, listen: bool = True) -> AsyncIterator[SlotClient]:
    """Use one stream; it is cancelled at the end."""
    client = SlotClient(call)
    if listen:
        client.listen()
    try:
        yield client
    finally:
        call.cancel()
        if client.reader is not None:
            await asyncio.wait([client.reader])
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                client.reader.result()


def image(slot: int, *, model: str = "", **options: Any) -> diffusion_pb2.GenerateImageRequest:
    """Make the start of a request for images."""
    start = {k: options.pop(k) for k in list(options) if k in _START_FIELDS}
    return diffusion_pb2.GenerateImageRequest(
        start=diffusion_pb2.StartImage(
            slot=slot,
            model=model,
            options=diffusion_pb2.DiffusionOptions(prompt="a red square", **options),
            **start,
        )
    )


_START_FIELDS = ("request_id", "priority", "timeout", "input_image", "trace")


def cancel_image(slot: int) -> diffusion_pb2.GenerateImageRequest:
    """Make a cancel."""
    return diffusion_pb2.GenerateImageRequest(cancel=diffusion_pb2.CancelDiffusion(slot=slot))


def batch(slot: int, *inputs: str | Sequence[int], **fields: Any) -> embedding_pb2.EmbedRequest:
    """Make the start of a batch."""
    message = embedding_pb2.EmbedRequest(start=embedding_pb2.StartEmbed(slot=slot, **fields))
    for part in inputs:
        if isinstance(part, str):
            message.start.inputs.add(text=part)
        else:
            message.start.inputs.add().token_ids.ids.extend(part)
    return message
