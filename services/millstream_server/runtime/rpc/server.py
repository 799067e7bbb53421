"""A gRPC server with what every service has: health, reflection, layers, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from millstream_server.runtime.lifecycle import conditions
from millstream_server.runtime.rpc import health, orca, reflection
from millstream_server.runtime.rpc.channel import bind, server_options
from millstream_server.runtime.rpc.interceptor import RpcInterceptor
from millstream_server.runtime.rpc.layer import Layer
from millstream_server.runtime.rpc.limits import LimitsLayer, RpcLimits
from millstream_server.runtime.rpc.open_calls import OpenCalls
from millstream_server.runtime.security.auth import AuthPolicy
from millstream_server.runtime.security.tls import ServerTls
from millstream_server.runtime.telemetry.load_meter import LoadMeter
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import DRAINING, SERVING
from millstream_server.runtime.telemetry.server_rpcs import TelemetryLayer
from millstream_server.runtime.telemetry.tracing import Tracing

log = get_log(__name__)

_LAST_WORDS_S = 1.0
"""Longest wait until statuses are sent; then gRPC cuts callers that don't read."""
_WATCH_S = 0.5
_HANDLERS_S = 5.0
"""Longest wait until cut handlers have cleaned up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of a server."""

    max_receive_bytes: int
    """Largest message accepted; a larger one ends its RPC with RESOURCE_EXHAUSTED."""
    max_connection_age_s: float = 0.0
    max_connection_age_grace_s: float = 0.0
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
    """A grpc.aio server with health (NOT_SERVING at first), reflection and typed errors.

    An RPC passes the layers of its `RpcInterceptor`, where failures become statuses, in this order:
    telemetry, which sees the final status; authentication; load reports, in the trailers; limits.
    A single request message is read after them.
    """

    def __init__(self, services: Sequence[str], options: ServerOptions) -> None:
        """``services`` are the full proto names it will serve; add the servicers to ``grpc``."""
        self._services = tuple(services)
        self._tls = options.tls
        self.died = asyncio.Event()
        """Set when gRPC accepts no more calls; only a new process helps."""
        self._watched: list[grpc.aio.Server] = []
        self._watching: asyncio.Task[None] | None = None
        self._open_calls = OpenCalls()
        self.grpc = grpc.aio.server(
            interceptors=[self._interceptor(options)],
            options=server_options(
                max_receive_bytes=options.max_receive_bytes,
                max_connection_age_s=options.max_connection_age_s,
                max_connection_age_grace_s=options.max_connection_age_grace_s,
            ),
        )
        self._watched.append(self.grpc)
        self.health = health.HealthServicer(services)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        self.conditions = conditions.HealthConditions(
            lambda serving: self.set_serving(serving=serving)
        )
        """The conditions that decide its health."""
        self._drains = self.conditions.own(conditions.DRAINING)
        names = [health.SERVICE_NAME]
        if not options.health_only:
            names = [*services, *names]
        self._reports: orca.OrcaServicer | None = None
        if options.load is not None:
            self._reports = orca.add_orca(self.grpc, options.load.read)
            names.append(orca.SERVICE)
        self._reflection = reflection.add_reflection(self.grpc, names)

    def _interceptor(self, options: ServerOptions) -> RpcInterceptor:
        served = [m for name in self._services for m in reflection.methods_of(name)]
        layers: list[Layer] = [
            TelemetryLayer(options.tracing, without_spans=options.without_spans, served=served),
            *options.auth.layers(),
        ]
        if options.load is not None:
            layers.append(orca.OrcaLayer(options.load.read, self._services))
        if options.limits is not None:
            layers.append(LimitsLayer(self._services, options.limits))
        return RpcInterceptor(*layers, services=self._services, open_calls=self._open_calls)

    async def listen(self, address: str) -> int:
        """Bind and start, NOT_SERVING; return the port.

        Raises:
            OSError: the address can't be bound.
        """
        self.set_serving(serving=False)
        port = bind(self.grpc, address, self._tls.credentials() if self._tls else None)
        await self.grpc.start()
        self._watching = asyncio.ensure_future(self._watch())
        return port

    def dies_with(self, other: grpc.aio.Server) -> None:
        """Also set `died` when ``other``, started before this one, stops serving."""
        self._watched.append(other)

    async def _watch(self) -> None:
        """Detect that gRPC serves no more: a `:path` that isn't UTF-8 ends grpcio 1.85's own loop.

        It happens before any code of ours runs. Open streams go on, new connections are refused,
        and gRPC reports nothing.
        """
        cores: list[Any] = [
            server._server  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
            for server in self._watched
        ]
        while all(core.is_running() for core in cores):  # noqa: ASYNC110 - they set no event
            await asyncio.sleep(_WATCH_S)
        log.error("gRPC's serving loop died; this process finishes its work and exits")
        self.died.set()

    def set_serving(self, *, serving: bool) -> None:
        """Set what health checks report; `liveness` is SERVING as long as the process responds."""
        self.health.set(serving=serving)
        for name in self._services:
            SERVING.labels(name).set(self.health.states[name])

    def begin_drain(self) -> None:
        """Set health to NOT_SERVING for good; new RPCs are still accepted."""
        self._drains.set()
        self.health.begin_drain()
        self.set_serving(serving=False)
        DRAINING.set(1)

    async def stop(self, grace_s: float) -> None:
        """Stop listening; RPCs still open after ``grace_s`` are cut and their handlers awaited."""
        if self._watching is not None:
            self._watching.cancel()
        self.health.close()
        self._reflection.close()
        if self._reports is not None:
            self._reports.close()
        stopping = asyncio.ensure_future(self.grpc.stop(grace_s + _LAST_WORDS_S))
        if not await self._open_calls.until_idle(grace_s):
            self._open_calls.cut()
        await stopping
        # gRPC's stop may return before the cancelled handlers have cleaned up.
        if not await self._open_calls.until_idle(_HANDLERS_S):
            log.warning("handlers still clean up", open=self._open_calls.count)
