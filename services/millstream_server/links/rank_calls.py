"""Scores on a link: one call per request, with its deadline and its trace."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import grpc

from millstream.v1 import embedding_pb2_grpc
from millstream_server.links.call_errors import error_of
from millstream_server.links.link import Connection
from millstream_server.protobuf.embedding import ranking_from_proto, rerank_to_proto
from millstream_server.runtime.errors import WorkerLostError
from millstream_server.runtime.telemetry.request_counts import RequestCounts
from millstream_server.runtime.telemetry.request_spans import reason_of
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.vectors.output import Ranking
from millstream_server.vectors.request import RerankRequest


class RankCalls:
    """The calls on one connection to a worker; the link's `AbilityCalls` for scores.

    It doesn't notice a lost connection itself: the Embed stream beside it does.
    """

    health_service = "millstream.v1.EmbeddingService"

    def __init__(self, connection: Connection) -> None:
        """Call on ``connection``."""
        self._stub: Any = embedding_pb2_grpc.EmbeddingServiceStub(connection.channel)
        self._view = connection.view
        self._counts = RequestCounts(connection.description.role.value)
        self._open: set[grpc.aio.Call] = set()
        self._finishing = False
        self._closed = False
        self._changed = asyncio.Event()

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Score pairs of token ids; cancelling this call cancels the request at the worker.

        Raises:
            ServingError: they were not scored.
        """
        left_s = None
        if request.deadline_s is not None:
            left_s = max(0.0, request.deadline_s - time.monotonic())
        call = self._stub.Rerank(
            rerank_to_proto(request), timeout=left_s, metadata=_metadata(request.trace)
        )
        with self._counted(call):
            try:
                return ranking_from_proto(await call)
            except grpc.aio.AioRpcError as error:
                raise error_of(error) from error
            except asyncio.CancelledError:
                if self._closed:  # `close` has cancelled the call, and not this task
                    raise _lost() from None
                call.cancel()
                raise

    @contextlib.contextmanager
    def _counted(self, call: grpc.aio.Call) -> Iterator[None]:
        self._open.add(call)
        self._view.in_flight += 1
        self._view.in_use += 1
        self._counts.begun()
        outcome = "OK"
        try:
            yield
        except BaseException as error:
            outcome = reason_of(error)
            raise
        finally:
            self._open.discard(call)
            self._view.in_flight -= 1
            self._view.in_use -= 1
            self._counts.ended(outcome)
            self._changed.set()

    async def run(self) -> None:
        """Wait until `finish` was called and no call is open."""
        while not self._finishing or self._open:
            self._changed.clear()
            await self._changed.wait()

    def finish(self) -> None:
        """Let `run` return as soon as no call is open."""
        self._finishing = True
        self._changed.set()

    def close(self) -> None:
        """Fail every call that is open."""
        self._closed = True
        for call in list(self._open):
            call.cancel()


def _lost() -> WorkerLostError:
    return WorkerLostError("the worker that ran this request went away; send it again")


def _metadata(trace: TraceContext) -> tuple[tuple[str, str], ...]:
    """Return the trace context as metadata; the channel's own, with tracing, replaces it."""
    pairs = {
        "traceparent": trace.traceparent,
        "tracestate": trace.tracestate,
        "baggage": trace.baggage,
    }
    return tuple((key, value) for key, value in pairs.items() if value)
