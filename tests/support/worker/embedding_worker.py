"""An embedding worker in the test's process, on a simulated engine, and its raw stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from millstream.v1 import embedding_pb2, embedding_pb2_grpc, errors_pb2
from millstream_server.embedding.worker.servicer import VectorSettings, make_plan
from millstream_server.engines.simulated.vectors import (
    SimulatedEmbedder,
    SimulatedEmbedderConfig,
    vector,
)
from millstream_testing.waiting import EOF, until
from tests.support.worker.hosted_worker import HostedWorker, host_settings, hosted_worker

MODEL = "tiny-embedder"


@dataclass(kw_only=True)
class Worker(HostedWorker):
    """A worker that runs here."""

    engine: SimulatedEmbedder

    @property
    def embedding(self) -> Any:
        return embedding_pb2_grpc.EmbeddingServiceStub(self.channel)

    def rerank(self, pairs: Sequence[Sequence[int]], *, within_s: float = 20, **fields: Any) -> Any:
        """Start a Rerank call."""
        request = embedding_pb2.RerankRequest(**fields)
        for pair in pairs:
            request.pairs.add().ids.extend(pair)
        return self.embedding.Rerank(request, timeout=within_s)


@dataclass
class Failed:
    """How a slot failed."""

    reason: str
    fields: list[str]
    message: str
    retryable: bool


class Stream:
    """One Embed stream, at the level of its messages."""

    def __init__(self, channel: Any, **call: Any) -> None:
        self.call = embedding_pb2_grpc.EmbeddingServiceStub(channel).Embed(**call)
        self.responses: list[embedding_pb2.EmbedResponse] = []
        self.ended: grpc.aio.AioRpcError | None = None
        self.reads = asyncio.Event()
        """Cleared: the test reads nothing."""
        self.reads.set()
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            while await self.reads.wait():
                response: Any = await self.call.read()
                if response is EOF:
                    return
                self.responses.append(response)
        except grpc.aio.AioRpcError as error:
            self.ended = error

    async def close(self) -> None:
        self.call.cancel()
        self.reads.set()
        await asyncio.wait({self._task})

    async def start(self, slot: int, inputs: Sequence[Sequence[int] | str], **fields: Any) -> None:
        start = embedding_pb2.StartEmbed(slot=slot, **fields)
        for ids in inputs:
            if isinstance(ids, str):
                start.inputs.add(text=ids)
            else:
                start.inputs.add().token_ids.ids.extend(ids)
        await self.call.write(embedding_pb2.EmbedRequest(start=start))

    async def cancel(self, slot: int) -> None:
        cancel = embedding_pb2.CancelEmbed(slot=slot)
        await self.call.write(embedding_pb2.EmbedRequest(cancel=cancel))

    @property
    def draining(self) -> bool:
        return any(response.draining for response in self.responses)

    def ends(self, slot: int) -> list[Any]:
        """Return the slot's terminal entries: EmbedFinished or RequestError."""
        return [
            *(end for r in self.responses for end in r.finished if end.slot == slot),
            *(end.error for r in self.responses for end in r.errors if end.slot == slot),
        ]

    async def end(self, slot: int) -> Any:
        await until(lambda: bool(self.ends(slot)))
        (end,) = self.ends(slot)
        return end

    async def finished(self, slot: int) -> embedding_pb2.EmbedFinished:
        end = await self.end(slot)
        assert isinstance(end, embedding_pb2.EmbedFinished), end
        return end

    async def failed(self, slot: int) -> Failed:
        end = await self.end(slot)
        assert not isinstance(end, embedding_pb2.EmbedFinished), end
        return Failed(
            errors_pb2.ErrorReason.Name(end.reason).removeprefix("ERROR_REASON_"),
            [violation.field for violation in end.violations],
            end.message,
            end.retryable,
        )

    def vectors(self, slot: int) -> dict[int, np.ndarray]:
        """Return what has come, by the input's index."""
        found: dict[int, np.ndarray] = {}
        for response in self.responses:
            for part in response.vectors:
                if part.slot != slot:
                    continue
                rows = np.frombuffer(part.values, "<f4").reshape(-1, part.dimensions)
                assert len(rows) == len(part.indices) > 0
                for index, row in zip(part.indices, rows, strict=True):
                    assert index not in found, "a vector twice"
                    found[index] = row
        return found

    async def embedded(self, slot: int) -> np.ndarray:
        """Wait for the good end; return all vectors in the order of the inputs."""
        await self.finished(slot)
        found = self.vectors(slot)
        return np.array([found[index] for index in range(len(found))])


def expected(
    inputs: Sequence[Sequence[int]], dimensions: int = 16, *, normalize: bool = True
) -> np.ndarray:
    """Work out what the simulated engine's vectors become."""
    rows = np.array([vector(ids, 16)[:dimensions] for ids in inputs], np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) if normalize else rows


@contextlib.asynccontextmanager
async def embedding_worker(
    config: SimulatedEmbedderConfig | None = None,
    vectors: VectorSettings | None = None,
    **changes: Any,
) -> AsyncIterator[Worker]:
    """Run a worker; ``changes`` are of its host's settings."""
    engine = SimulatedEmbedder(config)
    settings = host_settings(**changes)
    plan = make_plan(engine, MODEL, vectors)
    async with hosted_worker(settings, plan, engine.unwedge) as running:
        yield Worker(engine=engine, **running)


@contextlib.asynccontextmanager
async def embed_stream(one: Worker, **call: Any) -> AsyncIterator[Stream]:
    """Open a stream to a worker."""
    stream = Stream(one.channel, **call)
    try:
        yield stream
    finally:
        await stream.close()


@contextlib.asynccontextmanager
async def streaming(
    config: SimulatedEmbedderConfig | None = None,
    vectors: VectorSettings | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[Worker, Stream]]:
    """Run a worker and open a stream to it."""
    async with embedding_worker(config, vectors, **changes) as one, embed_stream(one) as stream:
        yield one, stream
