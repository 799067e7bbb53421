"""Server bootstrap, the same for every service: options, errors, health, reflection, signals."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from millstream_server.runtime.interceptors import ErrorInterceptor

logger = logging.getLogger(__name__)

_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
# BadRequest, ErrorInfo and RetryInfo must resolve for a reflection client that prints errors.
_RESOLVABLE = error_details_pb2.DESCRIPTOR


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Limits of one server."""

    max_receive_bytes: int
    """Largest message taken in; a larger one ends its RPC with RESOURCE_EXHAUSTED."""


class Server:
    """A grpc.aio server with health (NOT_SERVING until told), reflection and typed errors."""

    def __init__(self, services: Sequence[str], options: ServerOptions) -> None:
        """``services`` are the full proto names it will serve; add them through ``grpc``."""
        self.grpc = grpc.aio.server(
            interceptors=[ErrorInterceptor()],
            options=[
                ("grpc.max_receive_message_length", options.max_receive_bytes),
                ("grpc.max_send_message_length", -1),
                # Two servers on one port would share its connections; a taken port must fail.
                ("grpc.so_reuseport", 0),
                # Accept the keepalive pings of our own clients (10 s) and of idle streams.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        self._services = tuple(services)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        _add_reflection(
            (*services, "grpc.health.v1.Health", _REFLECTION_V1, reflection.SERVICE_NAME),
            self.grpc,
        )

    async def listen(self, address: str) -> int:
        """Bind and start, NOT_SERVING; answers the port.

        Raises:
            OSError: the address can't be bound.
        """
        await self.set_serving(serving=False)
        try:
            port = self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            message = f"can't listen on {address}: is the port taken?"
            raise OSError(message) from error
        await self.grpc.start()
        return port

    async def set_serving(self, *, serving: bool) -> None:
        """Tell health checks; `liveness` is up as long as the process answers."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        now = status.SERVING if serving else status.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, now)
        await self._health.set("liveness", status.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Stop listening; streams still open after ``grace_s`` are cut."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)


def _add_reflection(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Serve v1alpha as grpcio does, and v1, which has the same messages under another name."""
    reflection.enable_server_reflection(names, server)
    servicer = ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_REFLECTION_V1, {"ServerReflectionInfo": handler}),)
    )


async def until_signal(
    server: Server, drain: Callable[[], Awaitable[None]], failed: asyncio.Future[Any]
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; or until ``failed`` is set. Answers the exit code.

    A second signal cuts the drain short. Exit codes: 0 drained, 1 the service failed.
    """
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[None] = loop.create_future()
    again = asyncio.Event()

    def on_signal() -> None:
        if signalled.done():
            again.set()
        else:
            signalled.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await asyncio.wait({signalled, failed}, return_when=asyncio.FIRST_COMPLETED)
    await server.set_serving(serving=False)
    if failed.done():
        await asyncio.sleep(0.5)  # let the terminal frames of open requests leave
        await server.stop(0)
        return 1
    logger.info('phase="draining"')
    draining = asyncio.ensure_future(drain())
    hurry = asyncio.ensure_future(again.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurry):
        task.cancel()
    await server.stop(0.2)
    return 0
