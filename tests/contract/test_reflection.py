"""Reflection over a real socket, both versions: everything a client without stubs asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.longrunning import operations_proto_pb2  # type: ignore[import-untyped]
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from millstream.v1 import decode_pb2, processor_pb2, worker_pb2
from millstream_server.runtime.rpc import reflection as module
from millstream_server.runtime.rpc.grpc_server import RpcInterceptor
from millstream_server.runtime.rpc.health import SERVICE_NAME as HEALTH
from millstream_server.runtime.rpc.health import HealthServicer
from millstream_server.runtime.rpc.reflection import V1, V1ALPHA, Reflection, add_reflection
from millstream_testing.waiting import EOF
from tests.support.vendor import trap
from tests.support.wire.failures import refusal
from tests.support.wire.transports import new_server

MODULES = (processor_pb2, decode_pb2, worker_pb2)
SERVICES = tuple(
    service.full_name
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
)
LISTED = {*SERVICES, HEALTH, V1, V1ALPHA}
DETAILS = tuple(f"google.rpc.{name}" for name in ("ErrorInfo", "BadRequest", "RetryInfo", "Status"))
GRACE_S = 3.0
BUF = Path(sys.executable).with_name("buf")

Ask = reflection_pb2.ServerReflectionRequest
versions = pytest.mark.parametrize("version", [V1, V1ALPHA])


@dataclass(frozen=True)
class Running:
    server: grpc.aio.Server
    reflection: Reflection | None
    channel: grpc.aio.Channel
    port: int

    def stream(self, version: str) -> Any:
        method: Any = self.channel.stream_stream(
            f"/{version}/ServerReflectionInfo",
            request_serializer=Ask.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        return method()


@contextlib.asynccontextmanager
async def running(
    services: Iterable[str] = (*SERVICES, HEALTH), *, stock: bool = False
) -> AsyncIterator[Running]:
    server: Any = grpc.aio.server(interceptors=[RpcInterceptor()]) if stock else new_server()
    health = HealthServicer(SERVICES)
    health.set(serving=True)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection = None
    if stock:
        enable_server_reflection((*services, V1ALPHA), server)
    else:
        reflection = add_reflection(server, services)
    bind = server.add_insecure_port if stock else server.bind
    port = bind("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield Running(server, reflection, channel, port)
        finally:
            await server.stop(None)


async def ask(stream: Any, request: Any) -> Any:
    async with asyncio.timeout(5):
        await stream.write(request)
        answer = await stream.read()
    assert answer is not EOF
    assert answer.original_request == request
    return answer


async def files(stream: Any, request: Any) -> list[FileDescriptorProto]:
    answer = await ask(stream, request)
    assert answer.HasField("file_descriptor_response"), answer
    found = answer.file_descriptor_response.file_descriptor_proto
    return [FileDescriptorProto.FromString(serialized) for serialized in found]


def symbols(file: FileDescriptorProto) -> Iterator[str]:
    """Every message, enum, service and method that a file defines."""

    def within(prefix: str, message: DescriptorProto) -> Iterator[str]:
        name = f"{prefix}.{message.name}"
        yield name
        yield from (f"{name}.{enum.name}" for enum in message.enum_type)
        for nested in message.nested_type:
            yield from within(name, nested)

    for message in file.message_type:
        yield from within(file.package, message)
    yield from (f"{file.package}.{enum.name}" for enum in file.enum_type)
    for service in file.service:
        yield f"{file.package}.{service.name}"
        yield from (f"{file.package}.{service.name}.{method.name}" for method in service.method)


def built(found: Iterable[FileDescriptorProto]) -> DescriptorPool:
    """Build a pool of the files alone; fails when an import is not among them."""
    by_name = {file.name: file for file in found}
    pool, added = DescriptorPool(), set[str]()

    def add(name: str) -> None:
        if name not in added:
            added.add(name)
            for dependency in by_name[name].dependency:
                add(dependency)
            pool.AddSerializedFile(by_name[name].SerializeToString())

    for name in by_name:
        add(name)
    return pool


@versions
async def test_every_service_is_listed(version: str) -> None:
    async with running() as r:
        stream = r.stream(version)
        answer = await ask(stream, Ask(list_services="*", host="a.host"))
        names = [service.name for service in answer.list_services_response.service]
        assert len(names) == len(set(names))
        assert set(names) == LISTED
        assert answer.valid_host == "a.host"


@versions
async def test_everything_resolves(version: str) -> None:
    """As clients do: from the list to services, files and imports, and back by each symbol."""
    async with running() as r:
        stream = r.stream(version)
        known: dict[str, FileDescriptorProto] = {}
        for name in (*LISTED, *DETAILS):
            closure = await files(stream, Ask(file_containing_symbol=name))
            pool = built(closure)  # each answer is whole by itself
            assert pool.FindFileContainingSymbol(name)
            known |= {file.name: file for file in closure}
        assert "google/protobuf/duration.proto" in known
        for name, file in known.items():
            (first, *_) = await files(stream, Ask(file_by_filename=name))
            assert first == file
            for symbol in symbols(file):
                (first, *_) = await files(stream, Ask(file_containing_symbol=symbol))
                assert first.name == name, symbol
        pool = built(known.values())
        for service in LISTED:
            for method in pool.FindServiceByName(service).methods:
                assert method.input_type.full_name
                assert method.output_type.full_name


def both(why: str, raises: type[Exception] = AssertionError) -> pytest.MarkDecorator:
    """Run the test with grpcio's servicer too, which fails it: ``why``."""
    broken = trap(f"grpcio-reflection: {why}", raises)
    return pytest.mark.parametrize(
        "stock", [pytest.param(True, id="stock", marks=broken), pytest.param(False, id="ours")]
    )


@both("methods are not found by their symbol")
async def test_a_method_is_found_by_its_symbol(stock: bool) -> None:  # noqa: FBT001
    async with running(stock=stock) as r:
        (file, *_) = await files(r.stream(V1ALPHA), Ask(file_containing_symbol=f"{HEALTH}.Check"))
        assert file.package == "grpc.health.v1"


@both("v1alpha only", grpc.aio.AioRpcError)
async def test_v1_is_served(stock: bool) -> None:  # noqa: FBT001
    async with running(stock=stock) as r:
        assert (await ask(r.stream(V1), Ask(list_services=""))).HasField("list_services_response")


UNKNOWN = [
    Ask(file_by_filename="no/such.proto"),
    Ask(file_by_filename=""),
    Ask(file_containing_symbol="no.Such"),
    Ask(file_containing_symbol=""),
    Ask(file_containing_symbol="."),
    Ask(file_containing_symbol=f"{HEALTH}.NoSuchMethod"),
    Ask(all_extension_numbers_of_type="no.Such"),
    Ask(all_extension_numbers_of_type=HEALTH),
    # The process knows it, but nothing served uses it.
    Ask(file_containing_symbol="google.longrunning.Operations"),
    *(
        Ask(file_containing_extension={"containing_type": name, "extension_number": number})
        for name, number in [
            ("no.Such", 1),
            ("google.protobuf.MethodOptions", 72295728),
            ("google.rpc.ErrorInfo", 0),
            ("google.rpc.ErrorInfo", -1),
        ]
    ),
]


@versions
async def test_what_is_not_there_is_an_error_response_and_the_stream_goes_on(version: str) -> None:
    async with running() as r:
        stream = r.stream(version)
        for request in UNKNOWN:
            answer = await ask(stream, request)
            assert answer.HasField("error_response"), request
            assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
            assert answer.error_response.error_message
        answer = await ask(stream, Ask(host="nothing asked"))
        assert answer.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert (await ask(stream, Ask(list_services=""))).HasField("list_services_response")


@versions
async def test_extensions(version: str) -> None:
    """None of our protos has one; google.longrunning.Operations uses google.api.http."""
    operations = operations_proto_pb2.DESCRIPTOR.services_by_name["Operations"].full_name
    options, number = "google.protobuf.MethodOptions", 72295728
    async with running([operations]) as r:
        stream = r.stream(version)
        answer = await ask(stream, Ask(all_extension_numbers_of_type=options))
        numbers = answer.all_extension_numbers_response
        assert numbers.base_type_name == options
        assert number in numbers.extension_number
        extension = {"containing_type": options, "extension_number": number}
        (file, *rest) = await files(stream, Ask(file_containing_extension=extension))
        assert file.name == "google/api/annotations.proto"
        assert "google/api/http.proto" in {other.name for other in rest}
        answer = await ask(stream, Ask(all_extension_numbers_of_type="google.api.Http"))
        assert answer.HasField("all_extension_numbers_response")
        assert list(answer.all_extension_numbers_response.extension_number) == []


async def test_a_service_whose_stubs_are_missing_is_named_at_the_start() -> None:
    with pytest.raises(KeyError, match=r"no\.such\.Service"):
        add_reflection(grpc.aio.server(), ["no.such.Service"])


@both("an open stream holds server.stop for the whole grace")
async def test_open_streams_do_not_hold_a_stop(stock: bool) -> None:  # noqa: FBT001
    async with running(stock=stock) as r:
        used, unused = r.stream(V1ALPHA), r.stream(V1ALPHA)
        await ask(used, Ask(list_services=""))
        await unused.wait_for_connection()
        if r.reflection is not None:
            r.reflection.close()
        began = time.monotonic()
        await r.server.stop(GRACE_S)
        assert time.monotonic() - began < GRACE_S / 2


@versions
async def test_streams_end_with_a_reason_when_the_server_closes(version: str) -> None:
    async with running() as r:
        assert r.reflection is not None
        used, unused = r.stream(version), r.stream(version)
        await ask(used, Ask(list_services=""))
        r.reflection.close()
        for stream in (used, unused, r.stream(version)):
            failed = await refusal(stream)
            assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
            assert failed.message == "this server is shutting down"


async def test_a_client_that_is_done_ends_its_stream_well() -> None:
    async with running() as r:
        stream = r.stream(V1)
        await ask(stream, Ask(list_services=""))
        await stream.done_writing()
        assert await stream.read() is EOF
        assert await stream.code() is grpc.StatusCode.OK


# ---- a client that isn't ours


async def buf_curl(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        str(BUF),
        "curl",
        "--protocol=grpc",
        "--http2-prior-knowledge",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
async def test_buf_curl(protocol: str) -> None:
    async with running() as r:
        reflect = ("--reflect", f"--reflect-protocol={protocol}")
        url = f"http://127.0.0.1:{r.port}"
        listed = await buf_curl(*reflect, "--list-methods", url)
        assert f"{HEALTH}/Check" in listed.split()
        assert {line.rpartition("/")[0] for line in listed.split()} == LISTED
        data = json.dumps({"service": SERVICES[0]})
        answer = await buf_curl(*reflect, "--data", data, f"{url}/{HEALTH}/Check")
        assert json.loads(answer) == {"status": "SERVING"}


# ---- bounds: callers that don't read, that ask without end, that leave streams open


async def test_a_request_is_bounded_since_it_is_sent_back() -> None:
    async with running() as r:
        stream = r.stream(V1)
        await stream.write(Ask(file_containing_symbol="x" * 5000))
        assert (await refusal(stream)).code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_streams_are_bounded_by_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STREAMS", 4)
    async with running() as r:
        streams = [r.stream(V1), r.stream(V1ALPHA)]
        for stream in streams:
            await stream.write(Ask(list_services=""))
            await stream.read()
        failed = await refusal(r.stream(V1))
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert failed.message.startswith("2 reflection streams are open on this server, 2 of them")


async def test_a_stream_takes_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 2)
    async with running() as r:
        stream = r.stream(V1)
        for _ in range(2):
            await stream.write(Ask(list_services=""))
            assert (await stream.read()).list_services_response.service
        failed = await refusal(stream)
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")


async def test_a_stream_without_requests_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    async with running() as r:
        failed = await refusal(r.stream(V1))
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert failed.message == "no request came for 0.05 s; open another stream"


async def test_a_response_that_is_not_read_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREAD_S", 0.05)
    cancelled = asyncio.Event()

    class Unread:
        caller_key = "ipv4:127.0.0.1"

        def cancel(self) -> None:
            cancelled.set()

    async def requests() -> AsyncIterator[Any]:
        yield Ask(list_services="")

    call: Any = Unread()
    responses = Reflection((HEALTH,)).ServerReflectionInfo(requests(), call)
    async with contextlib.aclosing(responses), asyncio.timeout(5):  # type: ignore[type-var]
        await anext(responses)
        await cancelled.wait()
