"""The Processor's line: what runs and waits there, its rates, how long first tokens take.

They come from its load reports (ORCA), which its own port has, so that an address is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from millstream.orca import load_report_pb2, service_pb2, service_pb2_grpc
from millstream_client.errors import from_rpc_error
from millstream_server.cli.client import connect
from millstream_server.cli.flags import Destination, explain_tls
from millstream_server.routing.discovery.sources import Discovery

_AGAIN_S = 0.5
_LEAST_REPORT_S = 0.5
"""More reports than these a server doesn't send."""


@dataclass(frozen=True, slots=True)
class ProcessorRow:
    """A Processor; None: not known. Its fields are those of JSON."""

    address: str
    running: int | None = None
    queued: int | None = None
    requests_per_s: float | None = None
    """That ended, over five seconds."""
    failed_per_s: float | None = None
    """By the server's fault."""
    ttft_s: float | None = None
    """Mean time to the first token, of those that came since the last refresh."""
    problem: str = ""


class ProcessorWatch:
    """Keeps the last load report; `aclose` it."""

    def __init__(self, server: Destination, interval_s: float) -> None:
        """Connect; a server that can't be reached is tried again for ever."""
        self._server = server
        self._client = connect(server)
        self._interval_s = interval_s
        self._report: load_report_pb2.OrcaLoadReport | None = None
        self._problem = ""
        self._before: tuple[float, float] | None = None
        self._ttft_s: float | None = None
        self._following = asyncio.ensure_future(self._follow())

    @property
    def settled(self) -> bool:
        """Whether there is something to show."""
        return self._report is not None or bool(self._problem)

    def row(self) -> ProcessorRow:
        """Return what is known; the first tokens are those since the last call."""
        report = self._report
        if report is None:
            return ProcessorRow(self._server.address, problem=self._problem)
        named = report.named_metrics
        self._measure(named.get("first_tokens", 0.0), named.get("first_token_seconds", 0.0))
        known = "running_requests" in named  # an older Processor doesn't tell
        return ProcessorRow(
            address=self._server.address,
            running=round(named["running_requests"]) if known else None,
            queued=round(named["queued_requests"]) if known else None,
            requests_per_s=report.rps_fractional,
            failed_per_s=report.eps,
            ttft_s=self._ttft_s,
        )

    def _measure(self, count: float, seconds: float) -> None:
        """Keep the mean of the new first tokens; without any the last mean stays."""
        before_count, before_s = self._before or (0.0, 0.0)
        if count > before_count:
            self._ttft_s = (seconds - before_s) / (count - before_count)
        self._before = (count, seconds)

    async def aclose(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._client.close()

    async def _follow(self) -> None:
        stub: Any = service_pb2_grpc.OpenRcaServiceStub(self._client.channel)
        request = service_pb2.OrcaLoadReportRequest(report_interval=Duration())
        request.report_interval.FromNanoseconds(round(max(self._interval_s, _LEAST_REPORT_S) * 1e9))
        while True:
            try:
                async for report in stub.StreamCoreMetrics(request):
                    self._report, self._problem = report, ""
            except grpc.aio.AioRpcError as error:
                self._lost(from_rpc_error(error).message)
            else:
                self._lost("the server ended the connection")
            await asyncio.sleep(_AGAIN_S)

    def _lost(self, why: str) -> None:
        self._report, self._before = None, None
        self._problem = " ".join((explain_tls(why, self._server) or why).split())


class Processors:
    """Follows the Processors that discovery names; `aclose` it."""

    def __init__(self, discovery: Discovery, server: Destination, interval_s: float) -> None:
        """Connect to each as to ``server``."""
        self._server = server
        self._interval_s = interval_s
        self._watches: dict[str, ProcessorWatch] = {}
        self._found = False
        self._finding = asyncio.ensure_future(self._follow(discovery))

    @property
    def settled(self) -> bool:
        return self._found and all(watch.settled for watch in self._watches.values())

    def rows(self) -> Sequence[ProcessorRow]:
        """Return what is known of each.

        Raises:
            ValueError: an address can't be called.
        """
        if self._finding.done():
            self._finding.result()
        return [self._watches[address].row() for address in sorted(self._watches)]

    async def aclose(self) -> None:
        self._finding.cancel()
        await asyncio.gather(self._finding, return_exceptions=True)
        await asyncio.gather(*(watch.aclose() for watch in self._watches.values()))

    async def _follow(self, discovery: Discovery) -> None:
        async for addresses in discovery.watch():
            for address in addresses - self._watches.keys():
                server = replace(self._server, address=address)
                self._watches[address] = ProcessorWatch(server, self._interval_s)
            self._found = True
            for address in self._watches.keys() - addresses:
                await self._watches.pop(address).aclose()
