"""One gRPC server with everything that every service has, and how it sees its work out."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from millstream_server.runtime import health, orca, reflection
from millstream_server.runtime.auth import AuthPolicy
from millstream_server.runtime.channel import bind, server_options
from millstream_server.runtime.drain import OpenHandlers
from millstream_server.runtime.handlers import Layer
from millstream_server.runtime.load_meter import LoadMeter
from millstream_server.runtime.metrics import DRAINING, SERVING
from millstream_server.runtime.rpc_interceptor import RpcInterceptor
from millstream_server.runtime.rpc_limits import LimitsLayer, RpcLimits
from millstream_server.runtime.rpc_telemetry import TelemetryServerInterceptor
from millstream_server.runtime.tls import ServerTls
from millstream_server.runtime.tracing import Tracing

logger = logging.getLogger(__name__)
T = TypeVar("T")

DRAINED, FAILED, CUT_OFF = 0, 1, 3
"""Exit codes of a service; 2 is a wrong setting."""
_STOP_GRACE_S = 0.2
_LAST_WORDS_S = 1.0
"""How long statuses may take to leave; a caller that doesn't read is cut by gRPC then."""
_WATCH_S = 0.5
_HANDLERS_S = 5.0
"""How long handlers that were cut off may take to clean up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What differs from server to server."""

    max_receive_bytes: int
    """Largest message taken in; a larger one ends its RPC with RESOURCE_EXHAUSTED."""
    max_connection_age_s: float = 0.0
    max_connection_age_grace_s: float = 0.0
    tls: ServerTls | None = None
    auth: AuthPolicy = field(default_factory=AuthPolicy)
    limits: RpcLimits | None = None
    """Bounds over all open RPCs of its services; health, reflection and load reports are exempt."""
    tracing: Tracing | None = None
    without_spans: Collection[str] = ()
    """Methods whose streams carry many requests: those have spans, the stream has none."""
    load: LoadMeter | None = None
    """What load reports say; without it there are none."""


class Server:
    """A grpc.aio server with health (NOT_SERVING until told), reflection and typed errors.

    An RPC passes this in order: telemetry, which sees the final status; `RpcInterceptor`, where
    failures become statuses; its layers, in which the caller is recognized, the load report joins
    the trailers, limits are applied. Only then is a lone request message read.
    """

    def __init__(self, services: Sequence[str], options: ServerOptions) -> None:
        """``services`` are the full proto names it will serve; add them through ``grpc``."""
        self._services = tuple(services)
        self._tls = options.tls
        self.died = asyncio.Event()
        """gRPC takes no more calls; nothing but a new process helps."""
        self._watched: list[grpc.aio.Server] = []
        self._watching: asyncio.Task[None] | None = None
        self._handlers = OpenHandlers()
        self.grpc = grpc.aio.server(
            interceptors=self._interceptors(options),
            options=server_options(
                max_receive_bytes=options.max_receive_bytes,
                max_connection_age_s=options.max_connection_age_s,
                max_connection_age_grace_s=options.max_connection_age_grace_s,
            ),
        )
        self._watched.append(self.grpc)
        self.health = health.HealthServicer(services)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        names = [*services, health.SERVICE_NAME]
        self._reports: orca.OrcaServicer | None = None
        if options.load is not None:
            self._reports = orca.add_orca(self.grpc, options.load.read)
            names.append(orca.SERVICE)
        self._reflection = reflection.add_reflection(self.grpc, names)

    def _interceptors(self, options: ServerOptions) -> list[Any]:
        layers: list[Layer] = [*options.auth.layers()]
        if options.load is not None:
            layers.append(orca.OrcaLayer(options.load.read, self._services))
        if options.limits is not None:
            layers.append(LimitsLayer(self._services, options.limits))
        served = [m for name in self._services for m in reflection.methods_of(name)]
        return [
            TelemetryServerInterceptor(
                options.tracing, without_spans=options.without_spans, served=served
            ),
            RpcInterceptor(*layers, services=self._services, open_handlers=self._handlers),
        ]

    async def listen(self, address: str) -> int:
        """Bind and start, NOT_SERVING; answers the port.

        Raises:
            OSError: the address can't be bound.
        """
        self.set_serving(serving=False)
        port = bind(self.grpc, address, self._tls.credentials() if self._tls else None)
        await self.grpc.start()
        self._watching = asyncio.ensure_future(self._watch())
        return port

    def dies_with(self, other: grpc.aio.Server) -> None:
        """Count it as this one's death when ``other``, started before it, serves no more."""
        self._watched.append(other)

    async def _watch(self) -> None:
        """Notice that gRPC serves no more: a `:path` that isn't UTF-8 ends grpcio 1.85's own loop.

        No code of ours has a say before that. Open streams go on, new connections are refused, and
        gRPC tells nobody.
        """
        cores: list[Any] = [
            server._server  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
            for server in self._watched
        ]
        while all(core.is_running() for core in cores):  # noqa: ASYNC110 - they set no event
            await asyncio.sleep(_WATCH_S)
        logger.error("gRPC's serving loop died; this process ends what it has and leaves")
        self.died.set()

    def set_serving(self, *, serving: bool) -> None:
        """Tell health checks; `liveness` is up as long as the process answers."""
        self.health.set(serving=serving)
        for name in self._services:
            SERVING.labels(name).set(self.health.states[name])

    def begin_drain(self) -> None:
        """Turn NOT_SERVING for good; new RPCs are still taken."""
        self.health.begin_drain()
        self.set_serving(serving=False)
        DRAINING.set(1)

    async def stop(self, grace_s: float) -> None:
        """Stop listening; streams still open after ``grace_s`` are cut, their handlers awaited."""
        if self._watching is not None:
            self._watching.cancel()
        self.health.close()
        self._reflection.close()
        if self._reports is not None:
            self._reports.close()
        stopping = asyncio.ensure_future(self.grpc.stop(grace_s + _LAST_WORDS_S))
        if not await self._handlers.until_idle(grace_s):
            self._handlers.cut()
        await stopping
        # gRPC may be back before the handlers it cancelled have cleaned up.
        if not await self._handlers.until_idle(_HANDLERS_S):
            logger.warning("handlers still clean up open=%d", self._handlers.count)


class Signals:
    """SIGTERM and SIGINT, caught from the moment this is made, on the running event loop.

    The first asks to drain, the second to hurry.
    """

    def __init__(self) -> None:
        """Catch them."""
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._caught)

    def _caught(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Do ``work`` until it ends or the first signal comes; None: it was given up for that."""
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self.first.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            waiting.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})


async def until_signal(
    server: Server,
    signals: Signals,
    drain: Callable[[], Awaitable[bool]],
    failed: asyncio.Future[Any],
) -> int:
    """Serve until the first signal, then drain; or until something fails. Answers the exit code.

    ``drain`` answers whether all work ended. A second signal cuts it short, and so does ``failed``.
    Exit codes: 0 drained, 1 the service failed, 3 requests were cut off.
    """
    waits: list[asyncio.Future[Any]] = [_wait(signals.first), _wait(server.died)]
    await asyncio.wait({*waits, failed}, return_when=asyncio.FIRST_COMPLETED)
    server.begin_drain()
    clean = False
    if failed.done():
        await asyncio.sleep(0.5)  # let the terminal frames of open requests leave
    else:
        logger.info('phase="draining"')
        draining, hurry = asyncio.ensure_future(drain()), _wait(signals.second)
        waits += [draining, hurry]
        await asyncio.wait({draining, hurry, failed}, return_when=asyncio.FIRST_COMPLETED)
        clean = draining.done() and draining.result()
    for wait in waits:
        wait.cancel()
    await server.stop(_STOP_GRACE_S)
    logger.info('phase="stopped" clean=%s', str(clean).lower())
    if failed.done() or server.died.is_set():
        return FAILED
    return DRAINED if clean else CUT_OFF


def _wait(event: asyncio.Event) -> asyncio.Future[Any]:
    return asyncio.ensure_future(event.wait())
