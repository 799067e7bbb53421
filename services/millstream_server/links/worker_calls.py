"""All calls on one connection to a worker, of every ability that the worker has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millstream_server.engines.base import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.links.diffusion_rpc import DiffusionCall, DiffusionRpc
from millstream_server.links.embed_rpc import EmbedCall, EmbedRpc
from millstream_server.links.encode_stream import EncodeStream, Encoding
from millstream_server.links.generation_stream import GenerationStream
from millstream_server.links.link import AbilityCalls, Connection
from millstream_server.links.rank_calls import RankCalls
from millstream_server.links.slot_stream import SlotStream
from millstream_server.links.unread import UnreadOutput
from millstream_server.media.file import MediaFile
from millstream_server.runtime.errors import WorkerLostError
from millstream_server.synthesis.diffuser import DiffuserInfo
from millstream_server.synthesis.request import DiffusionRequest
from millstream_server.vectors.embedder import EmbedderInfo
from millstream_server.vectors.output import EmbedFinished, Ranking, Vectors
from millstream_server.vectors.request import EmbedRequest, RerankRequest


class WorkerCalls:
    """The link's `AbilityCalls`: those of every ability that the worker has."""

    def __init__(self, connection: Connection, unread: UnreadOutput | None = None) -> None:
        """Make the calls that the worker's description allows; ``unread``: see `SlotStream`."""
        worker = connection.description
        generates = isinstance(worker.engine, GeneratorInfo)
        self._generation = GenerationStream(connection) if generates else None
        encodes = worker.role is Role.ENCODE or worker.encoder is not None
        self._encoding = EncodeStream(connection) if encodes else None
        kinds = worker.engine.kinds if isinstance(worker.engine, DiffuserInfo) else ()
        self._diffusion = {
            kind: SlotStream(connection, DiffusionRpc(kind), unread) for kind in kinds
        }
        self._embedding: SlotStream[EmbedRequest, Vectors, EmbedFinished] | None = None
        self._ranking: RankCalls | None = None
        if isinstance(worker.engine, EmbedderInfo):
            # Also to a worker that only ranks: the stream says when the worker leaves or is lost.
            self._embedding = SlotStream(connection, EmbedRpc(), unread)
            self._ranking = RankCalls(connection)
        # The generation's `close` resets the view's counts, so it comes last.
        found: tuple[AbilityCalls | None, ...] = (
            self._encoding,
            *self._diffusion.values(),
            self._ranking,
            self._embedding,
            self._generation,
        )
        self._parts = [part for part in found if part is not None]

    @property
    def health_service(self) -> str:
        """See `AbilityCalls.health_service`: the generation's, where there is one."""
        return self._parts[-1].health_service

    def generate(self, request: GenerationRequest, sink: OutputSink) -> Callable[[], None]:
        """See `GenerationStream.start`.

        Raises:
            WorkerLostError: the worker doesn't generate.
        """
        if self._generation is None:
            raise WorkerLostError("the worker at this address no longer generates; retry")
        return self._generation.start(request, sink)

    def encode(self, file: MediaFile) -> Encoding:
        """See `EncodeStream.start`.

        Raises:
            WorkerLostError: the worker doesn't encode.
        """
        if self._encoding is None:
            raise WorkerLostError("the worker at this address no longer encodes; retry")
        return self._encoding.start(file)

    def release(self, lease: str) -> None:
        """See `EncodeStream.release`."""
        if self._encoding is not None:
            self._encoding.release(lease)

    def diffuse(self, request: DiffusionRequest) -> DiffusionCall:
        """See `SlotStream.start`.

        Raises:
            WorkerLostError: the worker doesn't make what is requested.
        """
        stream = self._diffusion.get(request.kind)
        if stream is None:
            raise WorkerLostError(
                f"the worker at this address no longer makes {request.kind.value}s; retry"
            )
        return stream.start(request)

    def embed(self, request: EmbedRequest) -> EmbedCall:
        """See `SlotStream.start`.

        Raises:
            WorkerLostError: the worker doesn't embed.
        """
        if self._embedding is None:
            raise WorkerLostError("the worker at this address no longer embeds; retry")
        return self._embedding.start(request)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """See `RankCalls.rerank`.

        Raises:
            WorkerLostError: the worker doesn't rank.
        """
        if self._ranking is None:
            raise WorkerLostError("the worker at this address no longer ranks; retry")
        return await self._ranking.rerank(request)

    async def run(self) -> None:
        """See `AbilityCalls.run`; a stream that breaks ends the others.

        No TaskGroup: in Python 3.11 one whose task fails leaves its parent marked as cancelled, and
        the link would take a lost worker for its own end.
        """
        tasks = [asyncio.ensure_future(part.run()) for part in self._parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def finish(self) -> None:
        """See `AbilityCalls.finish`."""
        for part in self._parts:
            part.finish()

    def close(self) -> None:
        """See `AbilityCalls.close`."""
        for part in self._parts:
            part.close()
