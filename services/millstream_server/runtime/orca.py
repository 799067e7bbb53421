"""ORCA load reports: plain gRPC clients with `weighted_round_robin` balance by what we tell them.

A report reaches a client in two ways, and it takes the one its service config names: as a trailer
of each RPC (`OrcaLayer`), or on a stream that the client opens by itself beside its RPCs
(`OrcaServicer`). The second suits generations, whose trailers come late.

A client's weight for a server is requests per second over utilization (gRFC A58); it ignores a
report where either is 0. `runtime.load_meter` measures both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from millstream.orca import load_report_pb2, service_pb2, service_pb2_grpc
from millstream_server.runtime.errors import OverloadedError, UnavailableError
from millstream_server.runtime.handlers import Context, service_of

TRAILER = "endpoint-load-metrics-bin"
"""Trailer that carries a serialized OrcaLoadReport, as every gRPC library expects it."""
SERVICE = service_pb2.DESCRIPTOR.services_by_name["OpenRcaService"].full_name
"""For reflection; never one of the services that `OrcaLayer` reports for."""
MAX_STREAMS = 16_384
"""Like health's watches: one a client, and open to strangers."""

# A report that every RPC carries is made anew ten times a second at most: then it costs nothing.
_REPORT_LIFE_S = 0.1
_DEFAULT_INTERVAL_S = 30.0
_MIN_INTERVAL_S = 0.5
_MAX_INTERVAL_S = 3600.0

# What a client's weight for us should suffer from. Requests that could never succeed, or that the
# caller gave up, say nothing about the server.
OUR_FAULT = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """How loaded the process is now. Shares are of what it may use; 0 means unknown."""

    application_utilization: float = 0.0
    """Work in hand over work it can do at once; above 1 while requests queue."""
    cpu_utilization: float = 0.0
    mem_utilization: float = 0.0
    rps: float = 0.0
    """Requests that ended, per second."""
    eps: float = 0.0
    """Those of them that the server failed, per second."""
    named_metrics: Mapping[str, float] = field(default_factory=dict)


LoadSource = Callable[[], LoadSnapshot]
"""Answers at once and cheaply; called ten times a second at most by each reporter."""


class _Report:
    """The report of the moment, as message and as bytes."""

    def __init__(self, source: LoadSource) -> None:
        self._source = source
        self._stale_at = 0.0
        self._message = load_report_pb2.OrcaLoadReport()
        self._trailer = (TRAILER, b"")

    def message(self) -> load_report_pb2.OrcaLoadReport:
        self._refresh()
        return self._message

    def trailer(self) -> tuple[str, bytes]:
        self._refresh()
        return self._trailer

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._stale_at:
            return
        self._stale_at = now + _REPORT_LIFE_S
        try:
            self._message = _to_message(self._source())
        except Exception:  # a load that can't be told must not end the RPC it would travel with
            logger.exception("the load can't be told; reporting the last one known")
        self._trailer = (TRAILER, self._message.SerializeToString())


class OrcaLayer:
    """Adds a report to the trailers of every RPC of some services, however the RPC ends.

    It belongs outside of what refuses calls for lack of room, so that refusals carry a report too:
    the status made of them keeps the trailers; and inside of what refuses strangers.
    """

    def __init__(self, source: LoadSource, services: Collection[str]) -> None:
        """Report for ``services`` (full proto names)."""
        self._report = _Report(source)
        self._services = frozenset(services)

    def covers(self, method: str) -> bool:
        """The services it was made for."""
        return service_of(method) in self._services

    @contextlib.contextmanager
    def around(
        self, requests: AsyncIterator[Any], context: Context
    ) -> Iterator[tuple[AsyncIterator[Any], Context]]:
        """Set the trailer at the start, for handlers that abort by themselves, and at the end."""
        self._attach(context)
        try:
            yield requests, context
        finally:
            self._attach(context)

    def _attach(self, context: Context) -> None:
        others = (pair for pair in context.trailing_metadata() or () if pair[0] != TRAILER)
        context.set_trailing_metadata((*others, self._report.trailer()))


class OrcaServicer(service_pb2_grpc.OpenRcaServiceServicer):
    """Sends reports to whoever asks, one every so many seconds."""

    def __init__(self, source: LoadSource) -> None:
        """Report what ``source`` says."""
        self._report = _Report(source)
        self._streams = 0
        self._closed = asyncio.Event()

    async def StreamCoreMetrics(  # noqa: N802 - the RPC's name
        self, request: service_pb2.OrcaLoadReportRequest, context: Context
    ) -> AsyncIterator[load_report_pb2.OrcaLoadReport]:
        """Report at once, then every interval, until the client leaves or the server drains."""
        if self._closed.is_set():
            # With a report, or with OK, gRPC's client would be back at once, again and again.
            raise UnavailableError("the server is shutting down and reports its load no longer")
        if self._streams >= MAX_STREAMS:
            raise OverloadedError("too many ask for this server's load", retry_delay_s=10.0)
        interval_s = _interval_s(request)
        self._streams += 1
        try:
            while not self._closed.is_set():
                yield self._report.message()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._closed.wait()
        finally:
            self._streams -= 1

    def close(self) -> None:
        """End all streams and refuse new ones: an open one would hold up the server's stop."""
        self._closed.set()


def add_orca(server: grpc.aio.Server, source: LoadSource) -> OrcaServicer:
    """Serve reports out of band; `close` what this answers when the server drains."""
    servicer = OrcaServicer(source)
    service_pb2_grpc.add_OpenRcaServiceServicer_to_server(servicer, server)
    return servicer


def _interval_s(request: service_pb2.OrcaLoadReportRequest) -> float:
    if not request.HasField("report_interval"):
        return _DEFAULT_INTERVAL_S
    asked = request.report_interval.seconds + request.report_interval.nanos / 1e9
    return min(max(asked, _MIN_INTERVAL_S), _MAX_INTERVAL_S)


def _to_message(load: LoadSnapshot) -> load_report_pb2.OrcaLoadReport:
    return load_report_pb2.OrcaLoadReport(
        application_utilization=load.application_utilization,
        cpu_utilization=load.cpu_utilization,
        mem_utilization=load.mem_utilization,
        rps_fractional=load.rps,
        eps=load.eps,
        named_metrics=load.named_metrics,
    )
