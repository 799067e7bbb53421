"""The end of EncodeService.Fetch that needs the embedding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NoReturn

import grpc
from opentelemetry.context import get_current
from opentelemetry.trace import Span, SpanKind, set_span_in_context

from millstream_server.encode.fetching.peer import BrokenTransferError, Peers
from millstream_server.encode.shared_work import SharedWork
from millstream_server.encode.transfer.settings import EmbeddingFetchSettings, Transfer
from millstream_server.encode.transfer.store import Lease, Leases
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.encode.transfer.ways import WayError, copied
from millstream_server.media.items import EmbeddingTicket
from millstream_server.media.tensor import Tensor, TensorSpec
from millstream_server.runtime.errors import EmbeddingTransferError, InvalidRequestError
from millstream_server.runtime.security.tls import ClientTls
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import (
    EMBEDDING_BYTES,
    EMBEDDING_DURATION,
    EMBEDDING_TRANSFERS,
    TICKETS_REFUSED,
)
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import PROPAGATOR, Tracing, fail, reason_of

log = get_log(__name__)

_Key = tuple[str, str, TensorSpec]  # address, lease


class EmbeddingFetcher:
    """Fetches embeddings from encode workers, and from this process. For one event loop."""

    def __init__(
        self,
        tickets: EmbeddingTickets,
        *,
        transfer: Transfer = Transfer.AUTO,
        timeout_s: float = 10.0,
        tls: ClientTls | None = None,
        local: Leases | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tickets = tickets
        self._peers = Peers(transfer, tls)
        self._timeout_s = timeout_s
        self._local = local
        self.tracing = tracing
        """Makes spans; None: there are none."""
        self._running: SharedWork[_Key, Tensor] = SharedWork()

    def use_local(self, leases: Leases) -> None:
        self._local = leases

    async def fetch(self, ticket: EmbeddingTicket, trace: TraceContext | None = None) -> Tensor:
        """Return the tensor, in memory of its own; who fetches the same one shares it: don't write.

        ``trace`` is the parent of the fetch's span; None: the current span is.

        Raises:
            InvalidRequestError: the ticket is forged or expired.
            EmbeddingTransferError: anything else; the request may be retried.
        """
        try:
            self._tickets.check(ticket)
        except InvalidRequestError:
            TICKETS_REFUSED.inc()
            raise
        key = (ticket.address, ticket.lease, ticket.tensor)
        async with self._running.result(key, lambda: self._run(ticket, trace)) as tensor:
            return tensor

    async def close(self) -> None:
        """Close all channels; fetches that run fail."""
        self._running.cancel()
        await self._peers.close()

    # ---- one transfer ----------------------------------------------------------------------------

    async def _run(self, ticket: EmbeddingTicket, trace: TraceContext | None) -> Tensor:
        span = self._span(ticket, trace)
        route = _Route(span)
        started_s = time.perf_counter()
        try:
            data = await self._bytes(ticket, route)
        except BaseException as error:
            if span is not None:
                fail(span, reason_of(error), error)
            raise
        finally:
            if span is not None:
                span.end()
        EMBEDDING_BYTES.labels("receiver", route.way).inc(data.nbytes)
        EMBEDDING_DURATION.labels(route.way).observe(time.perf_counter() - started_s)
        return Tensor(ticket.tensor, data)

    async def _bytes(self, ticket: EmbeddingTicket, route: _Route) -> memoryview:
        lease = self._local.find(ticket.lease) if self._local else None
        if self._local is not None and lease is not None:
            route.goes("local")
            return await _read_here(self._local, lease, ticket)
        with self._peers.using(ticket.address) as peer:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await peer.fetch(ticket, route.metadata, route.goes)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                peer.forget()
                self._fail(ticket, error, route.way)
            except (BrokenTransferError, WayError) as error:
                self._fail(ticket, error, route.way)

    def _fail(self, ticket: EmbeddingTicket, error: Exception, way: str) -> NoReturn:
        log.warning("an embedding was not fetched", sender=ticket.address, way=way, error=error)
        if isinstance(error, grpc.aio.AioRpcError) and (
            error.code() is grpc.StatusCode.INVALID_ARGUMENT
        ):
            raise InvalidRequestError.of(
                "ticket", "was refused by the encode worker: its key, clock or lease differs"
            ) from error
        within = f" within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else ""
        raise EmbeddingTransferError(
            f"an embedding did not arrive from its encode worker{within}; retry"
        ) from error

    # ---- telemetry -------------------------------------------------------------------------------

    def _span(self, ticket: EmbeddingTicket, trace: TraceContext | None) -> Span | None:
        if self.tracing is None:
            return None
        parent = Tracing.extract(trace) if trace is not None else get_current()
        return self.tracing.tracer.start_span(
            "fetch embedding",
            parent,
            SpanKind.CLIENT,
            {"millstream.embedding.bytes": ticket.tensor.nbytes},
        )


class _Route:
    """Which way the bytes go; the trace shows it."""

    def __init__(self, span: Span | None) -> None:
        self.way = "none"
        self._span = span
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, set_span_in_context(span) if span is not None else None)
        self.metadata: Mapping[str, str] = carrier
        """For the RPC: its spans are children."""

    def goes(self, way: str) -> None:
        self.way = way
        if self._span is not None:
            self._span.set_attribute("millstream.embedding.way", way)


async def _read_here(leases: Leases, lease: Lease, ticket: EmbeddingTicket) -> memoryview:
    if lease.stored.spec != ticket.tensor:
        raise InvalidRequestError.of("ticket.tensor", "is not the lease's tensor")
    with leases.store.pinned(lease.stored):
        data = await copied(lease.stored.view)
    EMBEDDING_TRANSFERS.labels("receiver", "local", "done").inc()
    return data


def fetch_tls(settings: EmbeddingFetchSettings) -> ClientTls | None:
    """Read the TLS files for dialing encode workers; None: plaintext.

    Raises:
        SettingsError: a file is missing or invalid.
    """
    if settings.encode_tls_dir is None:
        return None
    return ClientTls(
        settings.encode_tls_dir, server_name=settings.encode_tls_name, flag="--encode-tls-dir"
    )
