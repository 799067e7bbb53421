"""Serves the RPCs of a grpc.aio server by `serving`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from millstream_server.runtime.rpc.grpc_call import Context, GrpcCall
from millstream_server.runtime.rpc.layer import Layer
from millstream_server.runtime.rpc.open_calls import OpenCalls
from millstream_server.runtime.rpc.serving import Handler, Method, Rpcs


class RpcInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Runs the layers around each RPC, and ends it with the status of its failure.

    Other exceptions end the RPC with INTERNAL and an id of the log line; their text is not sent.
    Requests that don't parse end with INVALID_ARGUMENT.

    Handlers read and write on grpc.aio's context themselves, so that a message passes no further
    generator between grpc.aio and the servicer, however many layers there are.
    """

    def __init__(
        self,
        *layers: Layer,
        services: Sequence[str] = (),
        open_calls: OpenCalls | None = None,
    ) -> None:
        """Run ``layers`` in this order, the first outermost.

        ``services`` are named in the error of an unknown method. RPCs whose handlers run are in
        ``open_calls``; a server that stops cuts and awaits them.
        """
        self._rpcs = Rpcs(layers, services, open_calls or OpenCalls())
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler; only once per method that is served."""
        name: str = handler_call_details.method
        wrapped = self._wrapped.get(name)
        if wrapped is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        wrapped = _handler(self._rpcs.method(name, handler))
        if handler is not None:
            self._wrapped[name] = wrapped
        return wrapped


def _handler(method: Method) -> Handler:
    """Make a handler of a request stream, which is the same on the wire.

    For a single request grpc.aio would read it before our code runs: a caller that sends none
    could keep an RPC open for ever, neither counted nor authenticated, and a caller that
    closes without a message would never get a status.
    """

    async def stream(_requests: object, context: Context) -> None:
        call = GrpcCall(method.name, context, streaming=True)
        await method.serve(call)
        if call.aborted:
            raise call.aborted

    async def unary(_requests: object, context: Context) -> Any:
        call = GrpcCall(method.name, context, streaming=False)
        await method.serve(call)
        if call.aborted:
            raise call.aborted
        return call.response

    if method.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, method.parse, method.serialize)
    return grpc.stream_unary_rpc_method_handler(unary, method.parse, method.serialize)
