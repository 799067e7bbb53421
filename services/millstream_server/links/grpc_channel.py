"""A connection to a worker by grpc.aio."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from millstream_server.links.channel import CallError, Metadata, Rpc
from millstream_server.runtime.errors import Code
from millstream_server.runtime.rpc.channel import channel_options, open_channel
from millstream_server.runtime.rpc.status import DETAILS_KEY
from millstream_server.runtime.security.tls import ClientTls
from millstream_server.runtime.telemetry.client_rpcs import ClientSpans, observe_call
from millstream_server.runtime.telemetry.tracing import Tracing

# Frames gather while the Processor is busy, so they may be large. But they gather in the worker, as
# columns, and not as bytes on the way: what a new request sends and gets waits behind those bytes.
# gRPC's own window grows to megabytes, which is a second of a busy Processor's work.
_WINDOW_BYTES = 64 << 10
_OPTIONS = [
    # Workers send 3 MiB at once, but for a single thing: 11 MB of a long prompt's logprobs.
    *channel_options(max_receive_bytes=16 << 20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
]
_NOT_MEASURED = "grpc.health.v1.Health"
"""As at servers: it is called automatically."""


class GrpcChannel:
    """A `Channel`. Changed certificates need a new one."""

    def __init__(
        self, address: str, tls: ClientTls | None = None, tracing: Tracing | None = None
    ) -> None:
        """Prepare; the first RPC connects. Unary calls get spans if there is ``tracing``."""
        self._tls = tls
        self._spans = ClientSpans(tracing, address)
        self._channel = open_channel(address, tls, options=_OPTIONS)

    @property
    def stale(self) -> bool:
        return bool(self._tls and self._tls.changed())

    def stream(self, rpc: Rpc) -> _GrpcStream:
        method: Any = self._channel.stream_stream(*_arguments(rpc))
        return _GrpcStream(method(), rpc)

    def watch(self, rpc: Rpc, request: Any) -> _GrpcStream:
        method: Any = self._channel.unary_stream(*_arguments(rpc))
        return _GrpcStream(method(request), rpc)

    async def call(
        self,
        rpc: Rpc,
        request: Any,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        wait: bool = False,
    ) -> Any:
        method: Any = self._channel.unary_unary(*_arguments(rpc))
        span, metadata = self._spans.start(rpc.name, metadata)
        call = method(request, timeout=timeout_s, metadata=metadata, wait_for_ready=wait or None)
        observe_call(call, rpc.name, span)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise call_error(error) from error
        except asyncio.CancelledError:
            call.cancel()
            raise

    async def aclose(self) -> None:
        await self._channel.close(None)


class _GrpcStream:
    """A `Stream`."""

    __slots__ = ("_call", "cancel")

    def __init__(self, call: Any, rpc: Rpc) -> None:
        self._call = call
        self.cancel = call.cancel
        if rpc.service != _NOT_MEASURED:
            observe_call(call, rpc.name)

    async def read(self) -> Any:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise call_error(error) from error
        return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]

    async def write(self, message: Any) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise call_error(error) from error

    async def done_writing(self) -> None:
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise call_error(error) from error


def _arguments(rpc: Rpc) -> tuple[str, Any, Any]:
    return f"/{rpc.name}", rpc.request.SerializeToString, rpc.response.FromString


def call_error(error: grpc.aio.AioRpcError | asyncio.InvalidStateError) -> CallError:
    """Return a status of gRPC as a failure of ours, also that of a use after the end."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return CallError(Code.UNAVAILABLE, str(error))
    trailers: Any = error.trailing_metadata() or ()
    status = dict(trailers).get(DETAILS_KEY)
    code = Code(error.code().value[0])
    return CallError(code, error.details() or "", status if isinstance(status, bytes) else None)
