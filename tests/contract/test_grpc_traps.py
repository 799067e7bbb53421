"""What stock grpc.aio servers do that ours must not: each as a test of theirs and ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import worker_pb2
from millstream_server.runtime.health import HealthServicer
from millstream_server.runtime.rpc_limits import RpcLimits
from millstream_server.runtime.server import Server, ServerOptions
from tests.support.failures import refusal
from tests.support.waiting import until

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
"""One that reflection can describe; its methods are ours."""


class Trap:
    """Handlers that hang, fail, and take a moment to clean up."""

    def __init__(self) -> None:
        self.open = 0

    async def hang(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        self.open += 1
        try:
            yield b"begun"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            self.open -= 1

    async def fail(self, request: bytes, context: Any) -> bytes:
        raise RuntimeError("no such file: /etc/secret/key")

    @property
    def handlers(self) -> Any:
        methods = {
            "Hang": grpc.stream_stream_rpc_method_handler(self.hang),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)


def stock() -> Any:
    server = grpc.aio.server(maximum_concurrent_rpcs=1)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(()), server)
    return server


def ours() -> Server:
    limits = RpcLimits(max_open_streams=1)
    return Server((SERVICE,), ServerOptions(max_receive_bytes=1 << 20, limits=limits))


def both(reason: str) -> pytest.MarkDecorator:
    broken = pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"facts: {reason}")
    return pytest.mark.parametrize(
        "make", [pytest.param(stock, id="stock", marks=broken), pytest.param(ours, id="ours")]
    )


Make = Callable[[], Any]


@contextlib.asynccontextmanager
async def serving(server: Any, trap: Trap) -> AsyncIterator[Any]:
    core = getattr(server, "grpc", server)
    core.add_generic_rpc_handlers((trap.handlers,))
    port = core.add_insecure_port("127.0.0.1:0")
    await core.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def _hang(channel: Any) -> Any:
    call = channel.stream_stream(f"/{SERVICE}/Hang")()
    assert await call.read() == b"begun"
    return call


@both("maximum_concurrent_rpcs refuses health checks too")
async def test_a_full_server_answers_health_checks(make: Make) -> None:
    async with serving(make(), Trap()) as channel:
        await _hang(channel)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            raise AssertionError(error.code()) from error
        full = await refusal(channel.unary_unary(f"/{SERVICE}/Fail")(b""))
        assert (full.code, full.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")


@both("an uncaught exception's text reaches the client")
async def test_an_accident_tells_the_client_nothing(make: Make) -> None:
    async with serving(make(), Trap()) as channel:
        failed = await refusal(channel.unary_unary(f"/{SERVICE}/Fail")(b""))
    assert "secret" not in failed.message
    assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")


@both("stop returns before the handlers it cut off have cleaned up")
async def test_stop_awaits_the_handlers_it_cuts_off(make: Make) -> None:
    trap, server = Trap(), make()
    async with serving(server, trap) as channel:
        await _hang(channel)
        await server.stop(0)
        still_open = trap.open
        await until(lambda: not trap.open)
    assert still_open == 0


@both("a unary RPC that is closed without a message never gets a status")
async def test_a_request_that_never_came_is_missed(make: Make) -> None:
    async with serving(make(), Trap()) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Fail")(timeout=1.0)
        await call.done_writing()
        failed = await refusal(call)
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (failed.reason, failed.message) == ("INVALID_REQUEST", "the request message is missing")
