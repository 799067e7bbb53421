"""A gRPC server with what every service has: health, reflection, layers, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from grpc_health.v1 import health_pb2_grpc

from millstream_server.runtime.lifecycle import conditions
from millstream_server.runtime.rpc import health, http, orca, reflection
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.rpc.call import Layer
from millstream_server.runtime.rpc.channel import server_options
from millstream_server.runtime.rpc.grpc_server import GrpcServer, RpcInterceptor
from millstream_server.runtime.rpc.http_telemetry import HttpTelemetryLayer
from millstream_server.runtime.rpc.limits import LimitsLayer, RpcLimits
from millstream_server.runtime.rpc.served_call import OpenCalls
from millstream_server.runtime.rpc.server_telemetry import TelemetryLayer
from millstream_server.runtime.rpc.serving import Rpcs, ServicerTable
from millstream_server.runtime.security.tls import ServerTls
from millstream_server.runtime.telemetry.counts import LoadMeter
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import DRAINING, SERVING
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.server import H2Server
from millstream_server.runtime.work.pool import WorkPool

log = get_log(__name__)

_LAST_WORDS_S = 1.0
"""Longest wait until statuses are sent; then the transport cuts callers that don't read."""
_HANDLERS_S = 5.0
"""Longest wait until cut handlers have cleaned up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of a server."""

    max_receive_bytes: int
    """Largest message accepted; a larger one ends its RPC with RESOURCE_EXHAUSTED."""
    clients: TransportOptions | None = None
    """Bounds of a port that clients reach; None: the suite's own callers do, served by grpc.aio."""
    pool: WorkPool | None = None
    """Where the port of clients converts long JSON."""
    tls: ServerTls | None = None
    auth: AuthPolicy = field(default_factory=AuthPolicy)
    limits: RpcLimits | None = None
    """Limits over all open RPCs of its services; health, reflection and load reports are exempt."""
    tracing: Tracing | None = None
    without_spans: Collection[str] = ()
    """Methods whose streams carry many requests: each request has a span, the stream has none."""
    load: LoadMeter | None = None
    """The source of load reports; without it there are none."""
    health_only: bool = False
    """The services have a health each, but no servicers."""


class Server:
    """A gRPC server with health (NOT_SERVING at first), reflection and typed errors.

    An RPC passes layers, after which failures become statuses, in this order: telemetry, which
    sees the final status; authentication; load reports, in the trailers; limits. A single request
    message is read after them.
    """

    def __init__(self, services: Sequence[str], options: ServerOptions) -> None:
        """``services`` are the full proto names it will serve; add the servicers to ``methods``."""
        self._services = tuple(services)
        self._tls = options.tls
        self.died = asyncio.Event()
        """Set when the transport accepts no more calls; only a new process helps."""
        self._open_calls = OpenCalls()
        self._transport = self._make_transport(options)
        self.methods: ServicerTable = self._transport
        """Takes servicers, as a grpc.aio server does."""
        self.health = health.HealthServicer(services, lambda: self.conditions.holding)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.methods)
        self.conditions = conditions.HealthConditions(
            lambda serving: self.set_serving(serving=serving)
        )
        """The conditions that decide its health."""
        self._port_failed = self.conditions.own(conditions.PORT_FAILED)
        self._drains = self.conditions.own(conditions.DRAINING)
        names = [health.SERVICE_NAME]
        if not options.health_only:
            names = [*services, *names]
        self._reports: orca.OrcaServicer | None = None
        if options.load is not None:
            self._reports = orca.add_orca(self.methods, options.load.read)
            names.append(orca.SERVICE)
        self._reflection = reflection.add_reflection(self.methods, names)

    def _make_transport(self, options: ServerOptions) -> H2Server | GrpcServer:
        rpcs = Rpcs(self._layers(options), self._services, self._open_calls)
        if options.clients is not None:
            return H2Server(rpcs, options.clients, lambda: self.health.told, options.pool)
        return GrpcServer(
            RpcInterceptor(rpcs),
            server_options(max_receive_bytes=options.max_receive_bytes),
            self._transport_died,
        )

    def _transport_died(self) -> None:
        self._port_failed.set()
        self.died.set()

    def _layers(self, options: ServerOptions) -> list[Layer]:
        served = [m for name in self._services for m in reflection.methods_of(name)]
        layers: list[Layer] = [
            TelemetryLayer(options.tracing, without_spans=options.without_spans, served=served),
            *(auth := options.auth.layers()),
        ]
        if options.load is not None:
            layers.append(orca.OrcaLayer(options.load.read, self._services))
        limits = []
        if options.limits is not None:
            limits.append(LimitsLayer((*self._services, http.SERVICE), options.limits))
        self._http_layers: list[Layer] = [HttpTelemetryLayer(options.tracing), *auth, *limits]
        return [*layers, *limits]

    def serve_http(self, endpoints: Sequence[http.Endpoint], refuse: http.Refuse) -> None:
        """Serve HTTP besides, where clients are; ``refuse`` says failures of all other paths."""
        if isinstance(self._transport, H2Server):
            rpcs = Rpcs(self._http_layers, open_calls=self._open_calls)
            self._transport.endpoints = http.Endpoints(rpcs, endpoints, refuse)

    async def listen(self, address: str) -> int:
        """Bind and start, NOT_SERVING; return the port.

        Raises:
            OSError: the address can't be bound.
        """
        self.set_serving(serving=False)
        port = self._transport.bind(address, self._tls)
        await self._transport.start()
        return port

    def set_serving(self, *, serving: bool) -> None:
        """Set what health checks report; `liveness` is SERVING as long as the process responds."""
        self.health.set(serving=serving)
        for name in self._services:
            SERVING.labels(name).set(self.health.states[name])

    def begin_drain(self) -> None:
        """Set health to NOT_SERVING for good, announce the drain; new RPCs are still accepted."""
        if isinstance(self._transport, H2Server):
            self._transport.leaving = True
        self._drains.set()
        self.health.begin_drain()
        self.set_serving(serving=False)
        DRAINING.set(1)

    async def stop_accepting(self) -> None:
        """Send GOAWAY on all connections and take no new ones: callers go elsewhere by themselves.

        Returns when all callers have seen it. What is open goes on. grpc.aio can't do that without
        refusing RPCs that are under way: there nothing happens before `stop`.
        """
        if isinstance(self._transport, H2Server):
            await self._transport.stop_accepting()

    async def stop(self, grace_s: float) -> None:
        """Stop listening; RPCs still open after ``grace_s`` are cut and their handlers awaited."""
        self.health.close()
        self._reflection.close()
        if self._reports is not None:
            self._reports.close()
        stopping = asyncio.ensure_future(self._transport.stop(grace_s + _LAST_WORDS_S))
        if not await self._open_calls.until_idle(grace_s):
            self._open_calls.cut()
        await stopping
        # grpc.aio's stop may return before the cancelled handlers have cleaned up.
        if not await self._open_calls.until_idle(_HANDLERS_S):
            log.warning("handlers still clean up", open=self._open_calls.count)
