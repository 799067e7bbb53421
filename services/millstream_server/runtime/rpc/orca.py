"""ORCA load reports: gRPC clients with `weighted_round_robin` balance by them.

There are two ways; the client's service config chooses: a trailer of each RPC (`OrcaLayer`), or a
stream that the client opens besides its RPCs (`OrcaServicer`). The stream suits generations, whose
trailers come late.

A client's weight for a server is requests per second over utilization (gRFC A58); it ignores a
report where either is 0. `runtime.telemetry.counts` measures both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from typing import Any

from millstream.orca import load_report_pb2, service_pb2, service_pb2_grpc
from millstream_server.runtime.rpc.call import (
    SMALL_REQUEST_BYTES,
    Call,
    Visit,
    max_request_bytes,
    service_of,
)
from millstream_server.runtime.rpc.ledger import Shares
from millstream_server.runtime.telemetry.counts import LoadSnapshot, LoadSource
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

TRAILER = "endpoint-load-metrics-bin"
"""Trailer that carries a serialized OrcaLoadReport, as every gRPC library expects it."""
SERVICE = service_pb2.DESCRIPTOR.services_by_name["OpenRcaService"].full_name
"""For reflection; `OrcaLayer` doesn't report for this service."""
MAX_STREAMS = 4096
"""Open streams of all callers: one per client channel, open to callers without a key."""

# The report is made at most ten times a second, since every RPC carries it.
_REPORT_LIFE_S = 0.1
_DEFAULT_INTERVAL_S = 30.0
_MIN_INTERVAL_S = 0.5
_MAX_INTERVAL_S = 3600.0


class _Report:
    """The current report, as message and as bytes."""

    def __init__(self, source: LoadSource, *, named: bool) -> None:
        """``named``: with `LoadSnapshot.named`."""
        self._source = source
        self._named = named
        self._stale_at = 0.0
        self._message = load_report_pb2.OrcaLoadReport()
        self._trailer = b""

    def message(self) -> load_report_pb2.OrcaLoadReport:
        self._refresh()
        return self._message

    def trailer(self) -> bytes:
        self._refresh()
        return self._trailer

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._stale_at:
            return
        self._stale_at = now + _REPORT_LIFE_S
        try:
            load = self._source()
            self._message = _to_message(load if self._named else replace(load, named={}))
        except Exception as error:  # noqa: BLE001 - it must not end the RPC it would travel with
            log.error("load unknown; the last known one is reported", error=error)
        self._trailer = self._message.SerializeToString()


class OrcaLayer:
    """Adds a report to the trailers of every RPC of some services, however the RPC ends.

    It must be outside the limits layer, so that refusals carry a report too, and inside the
    authentication layer, so that unauthenticated callers get none.
    """

    def __init__(self, source: LoadSource, services: Collection[str]) -> None:
        """Report for ``services`` (full proto names)."""
        self._report = _Report(source, named=False)
        self._services = frozenset(services)

    def covers(self, method: str) -> bool:
        return service_of(method) in self._services

    def enter(self, call: Call) -> Visit:
        return _Reporting(call, self._report)


class _Reporting(Visit):
    """One RPC whose status carries a report."""

    __slots__ = ("_call", "_report")

    def __init__(self, call: Call, report: _Report) -> None:
        self._call = call
        self._report = report

    def leave(self) -> None:
        self._call.add_trailer(TRAILER, self._report.trailer())


class OrcaServicer(service_pb2_grpc.OpenRcaServiceServicer):
    """Sends each client a report at the interval it requests."""

    def __init__(self, source: LoadSource) -> None:
        self._report = _Report(source, named=True)
        self._shares = Shares(MAX_STREAMS, "load report streams")

    @max_request_bytes(SMALL_REQUEST_BYTES)
    async def StreamCoreMetrics(  # noqa: N802 - the RPC's name
        self, request: service_pb2.OrcaLoadReportRequest, call: Call
    ) -> AsyncIterator[load_report_pb2.OrcaLoadReport]:
        """Report at once, then every interval, until the client cancels or the server drains.

        Raises:
            UnavailableError: it drains. After OK gRPC's clients retry at once or log an error.
        """
        interval_s = _interval_s(request)
        with self._shares.share(call):
            while True:
                yield self._report.message()
                await asyncio.sleep(interval_s)

    def close(self) -> None:
        """End all streams and refuse new ones."""
        self._shares.close("the server is shutting down and reports its load no longer")


def add_orca(server: Any, source: LoadSource) -> OrcaServicer:
    """Serve reports out of band; `close` the returned servicer when the server drains."""
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
        named_metrics=load.named,
    )
