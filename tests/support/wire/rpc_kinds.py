"""A service of bytes with every kind of handler, each of which does what the request says.

`writer`, `reader`, "abort", "abort_with_status" and "set_code" are for servers without our
interceptor: they need grpc.aio's context.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from millstream_server.runtime.errors import Code, StatusError, UnavailableError
from millstream_testing.waiting import EOF
from tests.support.wire.transports import new_server

SERVICE = "test.v1.Kinds"


@dataclass
class Kinds:
    """The handlers, and how often they began and were cancelled."""

    entered: int = 0
    cancelled: int = 0

    async def _do(self, request: bytes, context: Any) -> None:
        self.entered += 1
        self.look(context)
        match request:
            case b"abort":
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")
            case b"abort_with_status":
                status = status_pb2.Status(code=14, message="away")
                await context.abort_with_status(rpc_status.to_status(status))
            case b"set_code":
                context.set_code(grpc.StatusCode.DATA_LOSS)
                context.set_details("gone")
            case b"refuse":
                raise StatusError(Code.FAILED_PRECONDITION, "not now")
            case b"away":
                raise UnavailableError("away")
            case b"bug":
                raise LookupError("a bug")
            case b"hang":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise

    def look(self, context: Any) -> None:
        """Overridden by tests that want to see what a handler sees."""

    async def unary(self, request: bytes, context: Any) -> bytes:
        await self._do(request, context)
        return b"answer"

    async def generator(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        if request == b"flood":
            while True:
                yield bytes(1 << 16)
        await self._do(request, context)
        yield b"last"

    async def writer(self, request: bytes, context: Any) -> None:
        await context.write(b"first")
        await self._do(request, context)
        await context.write(b"last")

    async def chat(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            await self._do(request, context)
            yield request

    async def reader(self, _: Any, context: Any) -> None:
        while (request := await context.read()) is not EOF:
            await self._do(request, context)
            await context.write(request)

    async def gather(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    def by_name(self) -> dict[str, Any]:
        """Return the handlers by the methods' names."""
        made: dict[str, Any] = {
            "Unary": (grpc.unary_unary_rpc_method_handler, self.unary),
            "Generator": (grpc.unary_stream_rpc_method_handler, self.generator),
            "Writer": (grpc.unary_stream_rpc_method_handler, self.writer),
            "Chat": (grpc.stream_stream_rpc_method_handler, self.chat),
            "Reader": (grpc.stream_stream_rpc_method_handler, self.reader),
            "Gather": (grpc.stream_unary_rpc_method_handler, self.gather),
        }
        return {name: make(behavior, bytes, bytes) for name, (make, behavior) in made.items()}

    def handlers(self) -> grpc.GenericRpcHandler:  # type: ignore[type-arg]
        return grpc.method_handlers_generic_handler(SERVICE, self.by_name())


class Client:
    """Calls of the service."""

    def __init__(self, channel: Any, target: str = "") -> None:
        self.channel = channel
        self.target = target
        self.unary = channel.unary_unary(f"/{SERVICE}/Unary")
        self.generator = channel.unary_stream(f"/{SERVICE}/Generator")
        self.writer = channel.unary_stream(f"/{SERVICE}/Writer")
        self.chat = channel.stream_stream(f"/{SERVICE}/Chat")
        self.reader = channel.stream_stream(f"/{SERVICE}/Reader")
        self.gather = channel.stream_unary(f"/{SERVICE}/Gather")


@contextlib.asynccontextmanager
async def serving(
    kinds: Kinds,
    around: Sequence[Any] = (),
    extra: Any = None,
) -> AsyncIterator[Client]:
    """Serve it behind layers, or on grpc.aio behind its interceptors.

    ``extra`` adds further services to the server.
    """
    on_grpc = any(isinstance(each, grpc.aio.ServerInterceptor) for each in around)
    server: Any = grpc.aio.server(interceptors=list(around)) if on_grpc else new_server(*around)
    server.add_generic_rpc_handlers((kinds.handlers(),))
    if extra:
        extra(server)
    bind = server.add_insecure_port if on_grpc else server.bind
    port = bind("127.0.0.1:0")
    await server.start()
    try:
        target = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(target) as channel:
            yield Client(channel, target)
    finally:
        await server.stop(0)
