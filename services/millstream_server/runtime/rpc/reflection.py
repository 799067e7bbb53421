"""`grpc.reflection` v1 and v1alpha, for clients without stubs.

It extends grpcio-reflection, which has v1alpha only, finds no methods, shows every proto that the
process has imported, and delays a stop for its whole grace. v1 has the same messages in
another package; old tools (evans) use v1alpha only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha._base import _file_descriptor_response, _not_found_error

from millstream_server.runtime.errors import OverloadedError, UnavailableError
from millstream_server.runtime.rpc.call import SMALL_REQUEST_BYTES, Call, max_request_bytes
from millstream_server.runtime.rpc.ledger import Shares
from millstream_server.runtime.rpc.serving import ServicerTable

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
MAX_STREAMS = 256
"""Of all callers: a tool has one, for a moment. One takes 27 KB, and one response of 25 KB."""
MAX_REQUESTS = 1000
"""Of one stream: several times what our protos have files and messages."""
IDLE_S = 60.0
"""Longest wait for a stream's next request. Tools open another one then; an open one counts."""
UNREAD_S = 60.0
"""Longest wait until a response was sent: a tool reads it at once."""
# Clients that print our errors look up Status, ErrorInfo, BadRequest and RetryInfo.
_ERRORS = (status_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR)


def add_reflection(server: ServicerTable, service_names: Iterable[str]) -> Reflection:
    """Serve both versions on ``server`` for ``service_names`` and for reflection itself.

    Call `Reflection.close` before the server is stopped.

    Raises:
        KeyError: the stubs of a service have not been imported.
    """
    reflection = Reflection(service_names)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in (V1, V1ALPHA)
        )
    )
    return reflection


class Reflection(ReflectionServicer):  # type: ignore[misc]
    """Describes the protos of the services given, and no other that the process has imported."""

    def __init__(self, service_names: Iterable[str]) -> None:
        """Describe these services, reflection and the details of our errors."""
        names = {*service_names, V1ALPHA}
        super().__init__({*names, V1}, _pool_of(names))
        self._made: dict[str, Any] = {}
        self._shares = Shares(MAX_STREAMS, "reflection streams")

    def close(self) -> None:
        """End open streams, idle ones too; new ones end at once."""
        self._shares.close("this server is shutting down")

    @max_request_bytes(SMALL_REQUEST_BYTES)  # the protocol has every request in its response
    async def ServerReflectionInfo(  # noqa: N802 - the proto's name
        self, request_iterator: AsyncIterator[Any], call: Call
    ) -> AsyncIterator[Any]:
        """Yield a response to each request; an error response where nothing is found.

        Raises:
            OverloadedError: too many streams are open, or this one had too many requests.
            UnavailableError: the servicer was closed, or the caller sends nothing.
        """
        loop = asyncio.get_running_loop()
        with self._shares.share(call):
            async with (
                contextlib.aclosing(_bounded(aiter(request_iterator))) as requests,
                contextlib.aclosing(super().ServerReflectionInfo(requests, None)) as responses,
            ):
                async for response in responses:
                    response.valid_host = response.original_request.host
                    unread = loop.call_later(UNREAD_S, call.cancel)
                    try:
                        yield response
                    finally:
                        unread.cancel()

    def _file_by_filename(self, request: Any, filename: str) -> Any:
        try:
            return self._response(request, self._pool.FindFileByName(filename))
        except KeyError:
            return _not_found_error(request)

    def _file_containing_symbol(self, request: Any, fully_qualified_name: str) -> Any:
        """Also find methods, which the protocol includes: the pool finds only their service."""
        service, _, method = fully_qualified_name.rpartition(".")
        with contextlib.suppress(KeyError):
            if method in self._pool.FindServiceByName(service).methods_by_name:
                fully_qualified_name = service
        try:
            file = self._pool.FindFileContainingSymbol(fully_qualified_name)
        except KeyError:
            return _not_found_error(request)
        return self._response(request, file)

    def _response(self, request: Any, file: Any) -> Any:
        """Describe a file and all that it imports; made once, since it takes 300 µs."""
        made = self._made.get(file.name)
        if made is None:
            made = _file_descriptor_response(file, None).file_descriptor_response
            self._made[file.name] = made
        return reflection_pb2.ServerReflectionResponse(
            file_descriptor_response=made, original_request=request
        )


def methods_of(service: str) -> list[str]:
    """List a service's methods as `/package.Service/Method`."""
    found = Default().FindServiceByName(service)
    return [f"/{service}/{method.name}" for method in found.methods]


def _pool_of(service_names: Iterable[str]) -> DescriptorPool:
    """Make a pool of the services' files, the error details and all that they import."""
    pool, known = DescriptorPool(), set[str]()

    def add(file: Any) -> None:
        if file.name not in known:
            known.add(file.name)
            for dependency in file.dependencies:
                add(dependency)
            pool.AddSerializedFile(file.serialized_pb)

    for name in service_names:
        add(Default().FindFileContainingSymbol(name))
    for file in _ERRORS:
        add(Default().FindFileByName(file.name))
    pool.AddSerializedFile(_v1_file())
    return pool


def _v1_file() -> bytes:
    file = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    text = text_format.MessageToString(file).replace("reflection.v1alpha", "reflection.v1")
    return text_format.Parse(text, FileDescriptorProto()).SerializeToString()


async def _bounded(requests: Any) -> AsyncGenerator[Any]:
    """Pass requests on.

    Raises:
        OverloadedError: there are too many.
        UnavailableError: none came in time.
    """
    for _ in range(MAX_REQUESTS):
        try:
            async with asyncio.timeout(IDLE_S):
                request = await anext(requests, None)
        except TimeoutError:
            why = f"no request came for {IDLE_S:g} s; open another stream"
            raise UnavailableError(why) from None
        if request is None:
            return
        yield request
    raise OverloadedError(
        f"a reflection stream takes {MAX_REQUESTS} requests; open another", retry_delay_s=1.0
    )
