"""Bounds over open RPCs, for every shape of handler; health and reflection don't count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue, StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millstream_server.runtime.rpc.health import HealthServicer
from millstream_server.runtime.rpc.limits import LimitsLayer, RpcLimits
from millstream_server.runtime.rpc.reflection import V1ALPHA, add_reflection
from millstream_server.runtime.telemetry.metrics import REGISTRY
from millstream_testing.waiting import EOF, until
from tests.support.wire.failures import refusal
from tests.support.wire.transports import new_server

SERVICE = "test.v1.Holding"
KINDS = {
    "Unary": "unary_unary",
    "Generator": "unary_stream",
    "Gather": "stream_unary",
    "Chat": "stream_stream",
}
STREAMING_IN = [name for name, kind in KINDS.items() if kind.startswith("stream")]
HELD = StringValue(value="x" * 98)  # 100 bytes on the wire


class Holding:
    """Handlers that hold their RPC open until they are let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.read = 0

    async def Unary(self, request: StringValue, _: Any) -> StringValue:
        self.read += 1
        await self.go.wait()
        return request

    async def Generator(self, request: StringValue, _: Any) -> AsyncIterator[StringValue]:
        self.read += 1
        yield request
        await self.go.wait()

    async def Gather(self, requests: AsyncIterator[StringValue], _: Any) -> StringValue:
        async for _request in requests:
            self.read += 1
        await self.go.wait()
        return StringValue()

    async def Chat(
        self, requests: AsyncIterator[StringValue], _: Any
    ) -> AsyncIterator[StringValue]:
        async for request in requests:
            self.read += 1
            yield request
        await self.go.wait()


class Served:
    """A running server."""

    def __init__(self, holding: Holding, limits: LimitsLayer, channel: Any) -> None:
        self.holding = holding
        self.limits = limits
        self.channel = channel

    def call(self, name: str, *requests: Any) -> Any:
        """Start a call; a stream sends these messages and stays open."""
        make = getattr(self.channel, KINDS[name])(
            f"/{SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=StringValue.FromString,
        )
        return make() if name in STREAMING_IN else make(*requests)

    async def open(self, name: str) -> Any:
        """Start a call that sends one message and is then held."""
        before = self.holding.read
        call = self.call(name, HELD)
        if name in STREAMING_IN:
            await call.write(HELD)
        started = asyncio.ensure_future(call) if name == "Unary" else None
        await until(lambda: self.holding.read == before + 1)
        return started or call


@contextlib.asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[Served]:
    holding = Holding()
    layer = LimitsLayer((SERVICE,), RpcLimits(**limits))
    server = new_server(layer)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                SERVICE,
                {
                    name: getattr(grpc, f"{kind}_rpc_method_handler")(
                        getattr(holding, name),
                        request_deserializer=StringValue.FromString,
                        response_serializer=StringValue.SerializeToString,
                    )
                    for name, kind in KINDS.items()
                },
            ),
        )
    )
    health = HealthServicer(())
    health.set(serving=True)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection = add_reflection(server, ())
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(holding, layer, channel)
    finally:
        health.close()
        reflection.close()
        await server.stop(0)


def _open_bytes() -> float:
    value = REGISTRY.get_sample_value("millstream_admission_open_bytes")
    assert value is not None
    return value


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", ["ends", "is cancelled"])
async def test_an_rpc_counts_with_its_bytes_until_it_is_over(name: str, way: str) -> None:
    async with serving() as served:
        before = _open_bytes()
        call = await served.open(name)
        assert (served.limits.streams.used, served.limits.bytes.used) == (1, 100)
        assert _open_bytes() == before + 100
        if way == "ends":
            served.holding.go.set()
            if name in STREAMING_IN:
                await call.done_writing()
            if hasattr(call, "read"):
                while await call.read() is not EOF:
                    pass
            else:
                await call
        else:
            call.cancel()
        await until(lambda: served.limits.streams.used == 0)
        assert served.limits.bytes.used == 0
        assert _open_bytes() == before


async def test_bytes_that_are_counted_elsewhere_are_not_counted_twice() -> None:
    async with serving(max_open_bytes=10, held_bytes=lambda _: 0) as served:
        await served.open("Chat")
        assert (served.limits.streams.used, served.limits.bytes.used) == (1, 0)


@pytest.mark.parametrize("name", KINDS)
async def test_one_rpc_too_many_is_refused_and_health_and_reflection_are_not(name: str) -> None:
    async with serving(max_open_streams=2) as served:
        held = [await served.open("Generator"), await served.open("Chat")]
        failed = await refusal(served.call(name, HELD))
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (failed.reason, failed.retryable) == ("OVERLOADED", True)
        assert failed.retry_delay_s == pytest.approx(1.0, rel=0.21)
        assert "2 RPCs are open" in failed.message

        health = health_pb2_grpc.HealthStub(served.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked: Any = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        call = asked.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        assert V1ALPHA in [s.name for s in (await call.read()).list_services_response.service]

        held[0].cancel()
        await until(lambda: served.limits.streams.used == 1)
        await served.open(name)


@pytest.mark.parametrize("name", KINDS)
async def test_bytes_over_the_limit_are_refused(name: str) -> None:
    async with serving(max_open_bytes=250) as served:
        held = [await served.open("Unary"), await served.open("Chat")]
        call = served.call(name, HELD)
        if name in STREAMING_IN:
            await call.write(HELD)
        failed = await refusal(call)
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (failed.reason, failed.retryable) == ("OVERLOADED", True)
        assert failed.retry_delay_s == pytest.approx(1.0, rel=0.21)
        assert (served.limits.streams.used, served.limits.bytes.used) == (2, 200)
        held[0].cancel()
        await until(lambda: served.limits.streams.used == 1)
        await served.open(name)


async def test_every_message_of_a_stream_counts() -> None:
    async with serving(max_open_bytes=250) as served:
        call = served.call("Chat")
        for _ in range(2):
            await call.write(HELD)
            assert await call.read() == HELD
        assert served.limits.bytes.used == 200
        await call.write(HELD)
        failed = await refusal(call)
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        await until(lambda: served.limits.streams.used == 0)
        assert served.limits.bytes.used == 0


@pytest.mark.parametrize("name", KINDS)
async def test_what_does_not_parse_is_refused_as_ever(name: str) -> None:
    async with serving() as served:
        bad = BytesValue(value=b"\xff\xfe")
        call = served.call(name, bad)
        if name in STREAMING_IN:
            await call.write(bad)
        failed = await refusal(call)
        assert (failed.code, failed.message) == (
            grpc.StatusCode.INTERNAL,
            "value: is not valid UTF-8",
        )
        await until(lambda: served.limits.streams.used == 0)
        assert served.limits.bytes.used == 0


async def test_an_unknown_method_stays_unimplemented() -> None:
    async with serving() as served:
        for method in (f"/{SERVICE}/None", "/no.such.Service/Call"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.channel.unary_unary(method)(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
