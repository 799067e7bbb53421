"""Vectors and scores on a link: batches in the Embed stream's slots, and Rerank calls beside it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

from millstream.v1 import embedding_pb2
from millstream_server.embedding.request import (
    EmbedFinished,
    EmbedRequest,
    Ranking,
    RerankRequest,
    Vectors,
)
from millstream_server.embedding.wire import (
    embed_content,
    embed_to_proto,
    ranking_from_proto,
    rerank_to_proto,
)
from millstream_server.links.channel import CallError, Metadata, rpc_of
from millstream_server.links.entry_stream import EntryRpc, EntryStream
from millstream_server.links.slot_stream import Connection
from millstream_server.links.unread import UnreadOutput
from millstream_server.runtime.errors import WorkerLostError
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import reason_of

_EMBED: EntryRpc[EmbedRequest, Vectors, EmbedFinished] = EntryRpc(
    rpc_of(embedding_pb2.DESCRIPTOR, "EmbeddingService/Embed"),
    embed_to_proto,
    embed_content,
    lambda vectors: len(vectors.values),
)
_RERANK = rpc_of(embedding_pb2.DESCRIPTOR, "EmbeddingService/Rerank")


class VectorStream(EntryStream[EmbedRequest, Vectors, EmbedFinished]):
    """The Embed stream of one connection to a worker, and its Rerank calls.

    Also to a worker that only ranks: the stream says when the worker leaves or is lost. It ends
    when neither a batch nor a call is open.
    """

    def __init__(self, connection: Connection, unread: UnreadOutput) -> None:
        super().__init__(connection, _EMBED, unread)
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Score pairs of token ids; cancelling this call cancels the request at the worker.

        Raises:
            ServingError: they were not scored.
        """
        left_s = None
        if request.deadline_s is not None:
            left_s = max(0.0, request.deadline_s - time.monotonic())
        call = self._connection.channel.call(
            _RERANK,
            rerank_to_proto(request),
            timeout_s=left_s,
            metadata=_metadata(request.trace),
        )
        with self._counted(asyncio.ensure_future(call)) as task:
            try:
                return ranking_from_proto(await task)
            except CallError as error:
                raise error.failure() from error
            except asyncio.CancelledError:
                if self._closed:  # `close` has cancelled the call, and not this task
                    raise WorkerLostError(self.lost) from None
                raise

    @contextlib.contextmanager
    def _counted(self, task: asyncio.Task[Any]) -> Iterator[asyncio.Task[Any]]:
        self._calls.add(task)
        self.view.begin(self.view)
        self._counts.begun()
        outcome = "OK"
        try:
            yield task
        except BaseException as error:
            outcome = reason_of(error)
            raise
        finally:
            self._calls.discard(task)
            self.view.end(self.view)
            self._counts.ended(outcome)
            self._filled.set()

    def close(self) -> None:
        """See `SlotStream.close`; the calls fail, too."""
        self._closed = True
        for task in self._calls:
            task.cancel()
        super().close()

    @property
    def _idle(self) -> bool:
        return super()._idle and not self._calls


def _metadata(trace: TraceContext) -> Metadata:
    """Return the trace context as metadata; the channel's own, with tracing, replaces it."""
    pairs = {
        "traceparent": trace.traceparent,
        "tracestate": trace.tracestate,
        "baggage": trace.baggage,
    }
    return tuple((key, value) for key, value in pairs.items() if value)
