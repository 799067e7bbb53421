"""A service that answers with its caller's name, in every shape an RPC has.

The server is put together as `runtime.lifecycle.server` does it, but from the parts alone, on the
transport of the test.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2_grpc

from millstream_server.runtime.rpc.auth import AuthPolicy, caller
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.channel import channel_options, open_channel
from millstream_server.runtime.rpc.health import SERVICE_NAME, HealthServicer
from millstream_server.runtime.rpc.reflection import add_reflection
from millstream_server.runtime.security.tls import ClientTls, ServerTls
from tests.support.wire.transports import new_server

SERVICE = "test.v1.Echo"
SHAPES = ("Unary", "Stream", "ClientStream", "Bidi")
_KINDS = {
    "Unary": "unary_unary",
    "Stream": "unary_stream",
    "ClientStream": "stream_unary",
    "Bidi": "stream_stream",
}


class Echo:
    """Counts how often it was reached."""

    def __init__(self) -> None:
        self.reached = 0
        self.caller_key = ""

    def _answer(self, request: StringValue, call: Call) -> StringValue:
        self.reached += 1
        self.caller_key = call.caller_key
        who = caller()
        return StringValue(value=f"{request.value} {who.kind.value} {who.name}")

    async def Unary(self, request: StringValue, call: Call) -> StringValue:
        return self._answer(request, call)

    async def Stream(self, request: StringValue, call: Call) -> AsyncIterator[StringValue]:
        yield self._answer(request, call)

    async def ClientStream(self, requests: AsyncIterator[StringValue], call: Call) -> StringValue:
        return [self._answer(request, call) async for request in requests][-1]

    async def Bidi(
        self, requests: AsyncIterator[StringValue], call: Call
    ) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield self._answer(request, call)


class Echoing:
    """A running server and how to call it."""

    def __init__(self, echo: Echo, port: int) -> None:
        self.echo = echo
        self.port = port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def channel(self, tls: ClientTls | None = None) -> Any:
        return open_channel(self.address, tls, options=channel_options(max_receive_bytes=1 << 20))


def call(channel: Any, shape: str, *, metadata: Any = ()) -> Any:
    """Start an RPC of a shape and send "hi"."""
    data = StringValue(value="hi").SerializeToString()
    return raw_call(channel, _KINDS[shape], f"/{SERVICE}/{shape}", data, metadata)


def start(channel: Any, shape: str, *, metadata: Any = ()) -> Any:
    """Start an RPC of a shape that will be refused; a stream sends nothing, see `raw_call`."""
    return raw_call(channel, _KINDS[shape], f"/{SERVICE}/{shape}", None, metadata)


def raw_call(channel: Any, kind: str, method: str, data: bytes | None, metadata: Any = ()) -> Any:
    """Start an RPC of a kind and send bytes.

    Without ``data`` a stream sends nothing: when a stream is refused while grpc.aio's client still
    writes, it may report an INTERNAL of its own and forget the status (grpc/grpc#36066).
    """
    make = getattr(channel, kind)(method)
    if not kind.startswith("stream"):
        return make(data or b"", metadata=metadata, timeout=10)
    return make(iter([data]) if data is not None else None, metadata=metadata, timeout=10)


async def answer(started: Any) -> str:
    """Await the one answer of a call."""
    data = await started.read() if hasattr(started, "read") else await started
    return StringValue.FromString(data).value


@contextlib.asynccontextmanager
async def echoing(
    policy: AuthPolicy | None = None, tls: ServerTls | None = None, server: Any = None
) -> AsyncIterator[Echoing]:
    """Serve on a free port; ``server`` replaces the one with the layers of a policy."""
    layers = policy.layers() if policy is not None else []
    server = server or new_server(*layers, max_receive_bytes=1 << 20)
    echo = Echo()
    handlers = {
        shape: getattr(grpc, f"{kind}_rpc_method_handler")(
            getattr(echo, shape),
            request_deserializer=StringValue.FromString,
            response_serializer=StringValue.SerializeToString,
        )
        for shape, kind in _KINDS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    health = HealthServicer(())
    health.set(serving=True)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    listed = add_reflection(server, (SERVICE_NAME,))
    port = server.bind("127.0.0.1:0", tls)
    await server.start()
    try:
        yield Echoing(echo, port)
    finally:
        health.close()
        listed.close()
        await server.stop(0)
