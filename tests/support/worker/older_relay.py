"""A relay between a Processor and a worker: each sees of the other what contract 0.1.0 has.

So a worker gets the messages of a Processor of that version, and a Processor those of such a
worker: fields that came later are cut off, and methods that came later aren't implemented.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

RELEASE = Path(__file__).resolve().parents[3] / "proto/releases/0.1.0.binpb"


class _Types(NamedTuple):
    request: Any
    response: Any


@cache
def _methods() -> dict[str, _Types]:
    """Return the release's methods, as a call names them."""
    files = FileDescriptorSet.FromString(RELEASE.read_bytes()).file
    pool = DescriptorPool()
    for file in files:
        pool.Add(file)
    return {
        f"/{file.package}.{service.name}/{method.name}": _Types(
            *(
                GetMessageClass(pool.FindMessageTypeByName(name.lstrip(".")))
                for name in (method.input_type, method.output_type)
            )
        )
        for file in files
        for service in file.service
        for method in service.method
    }


class OlderRelay(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Passes calls on to a worker; counts messages that had more than the release has."""

    def __init__(self, worker: grpc.aio.Channel) -> None:
        self.cut_requests = 0
        self.cut_responses = 0
        self._worker = worker

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        types = _methods().get(method)
        if types is None and method.startswith("/millstream."):
            return None
        return grpc.stream_stream_rpc_method_handler(partial(self._relay, method, types))

    async def _relay(
        self, method: str, types: _Types | None, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        async def older() -> AsyncIterator[bytes]:
            async for request in requests:
                cut = _cut(request, types.request) if types else request
                self.cut_requests += len(cut) < len(request)
                yield cut

        call = self._worker.stream_stream(method, None, None)(
            older(), metadata=context.invocation_metadata(), timeout=context.time_remaining()
        )
        try:
            async for response in call:
                cut = _cut(response, types.response) if types else response
                self.cut_responses += len(cut) < len(response)
                yield cut
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", error.trailing_metadata())
        finally:
            call.cancel()


def _cut(message: bytes, known: Any) -> bytes:
    older = known.FromString(message)
    older.DiscardUnknownFields()
    return older.SerializeToString()  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def older(address: str) -> AsyncIterator[tuple[str, OlderRelay]]:
    """Relay to the worker at an address; yields the address to use instead."""
    server = grpc.aio.server()
    async with grpc.aio.insecure_channel(address) as worker:
        relay = OlderRelay(worker)
        server.add_generic_rpc_handlers((relay,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}", relay
        finally:
            await server.stop(0)
