"""What stock grpc.aio servers do that ours must not: each as a test of theirs and ours."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from packaging.utils import canonicalize_name

from millstream.v1 import worker_pb2, worker_pb2_grpc
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.lifecycle.service import Service, ServicePlan
from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.rpc.channel import channel_options, open_channel
from millstream_server.runtime.rpc.health import SERVICE_NAME as HEALTH
from millstream_server.runtime.rpc.health import HealthServicer
from millstream_server.runtime.rpc.limits import RpcLimits
from millstream_server.runtime.telemetry.counts import LoadMeter
from millstream_server.runtime.transport.options import TransportOptions
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.vendor import trap
from tests.support.wire.failures import refusal

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
"""One that reflection can describe; its methods are ours."""
FAIL, ECHO = f"/{SERVICE}/Fail", f"/{SERVICE}/Echo"
BIG = 8 << 20
ZEROS = bytes(1 << 16)
AS_SENT = (("grpc.per_message_decompression", 0),)
"""Of the end that receives: hand over what came, compressed or not."""


class Trap:
    """Handlers that hang, fail, echo, and take a moment to clean up."""

    def __init__(self) -> None:
        self.open = 0
        self.address = ""

    async def hang(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        self.open += 1
        try:
            yield b"begun"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            self.open -= 1

    async def swallow(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        self.open += 1
        with contextlib.suppress(asyncio.CancelledError):
            yield b"begun"
            await asyncio.Event().wait()
        self.open -= 1

    async def fail(self, request: bytes, context: Any) -> bytes:
        raise RuntimeError("no such file: /etc/secret/key")

    async def echo(self, request: bytes, context: Any) -> bytes:
        return request

    @property
    def handlers(self) -> Any:
        methods = {
            "Hang": grpc.stream_stream_rpc_method_handler(self.hang),
            "Swallow": grpc.stream_stream_rpc_method_handler(self.swallow),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)


Make = Callable[..., Any]


def stock(most: int = 1, **arguments: Any) -> Any:
    """Make one that takes ``most`` RPCs at once."""
    server = grpc.aio.server(maximum_concurrent_rpcs=most, **arguments)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(()), server)
    return server


STREAMS = 500


def ours(most: int = 1, *, on_grpc: bool = False) -> Server:
    clients = TransportOptions(
        max_receive_bytes=BIG, max_open_streams=most, max_resets=10 * STREAMS, resets_per_s=STREAMS
    )
    limits = RpcLimits(max_open_streams=most)
    options = ServerOptions(max_receive_bytes=BIG, limits=limits)
    return Server((SERVICE,), options if on_grpc else replace(options, clients=clients))


ours_on_grpc = functools.partial(ours, on_grpc=True)
OURS = pytest.mark.parametrize(
    "make", [pytest.param(ours, id="h2"), pytest.param(ours_on_grpc, id="grpc")]
)


def both(reason: str) -> pytest.MarkDecorator:
    """Run the test with a stock server too, which fails an assertion of it.

    It asserts what a repaired one would do; what only ours says belongs in a test of its own.
    """
    return pytest.mark.parametrize(
        "make",
        [
            pytest.param(stock, id="stock", marks=trap(reason)),
            pytest.param(ours, id="ours"),
            pytest.param(ours_on_grpc, id="ours on grpc.aio"),
        ],
    )


@contextlib.asynccontextmanager
async def serving(
    server: Any, trap: Trap, connect: Make = grpc.aio.insecure_channel
) -> AsyncIterator[Any]:
    getattr(server, "methods", server).add_generic_rpc_handlers((trap.handlers,))
    if isinstance(server, Server):
        port = await server.listen("127.0.0.1:0")
    else:
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
    trap.address = f"127.0.0.1:{port}"
    async with connect(trap.address) as channel:
        yield channel
    await server.stop(0)


async def _hang(channel: Any) -> Any:
    call = channel.stream_stream(f"/{SERVICE}/Hang")()
    assert await call.read() == b"begun"
    return call


async def _send_nothing(channel: Any) -> Any:
    """Close a unary RPC without its message."""
    call = channel.stream_stream(FAIL)(timeout=2.0)
    await call.done_writing()
    return await refusal(call)


# ---- how RPCs end


@both("maximum_concurrent_rpcs refuses health checks too")
async def test_a_full_server_answers_health_checks(make: Make) -> None:
    async with serving(make(), Trap()) as channel:
        await _hang(channel)
        full = await refusal(channel.unary_unary(FAIL)(b""))
        assert full.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        stub: Any = health_pb2_grpc.HealthStub(channel)
        check = stub.Check(health_pb2.HealthCheckRequest())
        assert await check.code() is grpc.StatusCode.OK


@both("an uncaught exception's text reaches the client")
async def test_an_accident_tells_the_client_nothing(make: Make) -> None:
    async with serving(make(), Trap()) as channel:
        failed = await refusal(channel.unary_unary(FAIL)(b""))
    assert failed.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    assert "secret" not in failed.message


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
        failed = await _send_nothing(channel)
    assert failed.code is not grpc.StatusCode.DEADLINE_EXCEEDED


@OURS
async def test_ours_gives_its_reasons(make: Make) -> None:
    async with serving(make(), Trap()) as channel:
        failed = await refusal(channel.unary_unary(FAIL)(b""))
        assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert failed.error_id in failed.message
        missed = await _send_nothing(channel)
        assert missed.code is grpc.StatusCode.UNIMPLEMENTED
        assert missed.message == "the request message is missing"
        await _hang(channel)
        full = await refusal(channel.unary_unary(FAIL)(b""))
        assert (full.code, full.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")


# ---- what cancelled streams leave behind


MOST_LEFT = 48
"""Bytes a stream. The status that nobody will read is an array of 96, which aio never frees."""


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 answers."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _allocated() -> int:
    """Count the bytes in use that the main thread's malloc gave, to the byte, not to the page."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    return int(mallinfo2().uordblks)


async def _leave(trap: Trap, method: str) -> None:
    """Cancel streams of one connection: h2 remembers how 4,096 of an open one ended."""
    async with our_channel(trap.address) as channel:
        for _ in range(STREAMS):
            call = channel.stream_stream(f"/{SERVICE}/{method}")()
            assert await call.read() == b"begun"
            call.cancel()
        await until(lambda: trap.open == 0)


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc's malloc is asked"
)
@pytest.mark.parametrize(
    ("make", "method"),
    [
        pytest.param(
            stock,
            "Swallow",
            id="stock",
            marks=trap("a handler that swallows its cancellation leaks (grpc issue 43360)"),
        ),
        pytest.param(ours, "Hang", id="ours"),
        pytest.param(ours_on_grpc, "Hang", id="ours on grpc.aio"),
    ],
)
async def test_cancelled_streams_leave_nothing_behind(make: Make, method: str) -> None:
    """Ours passes the cancellation on through everything that is around a handler."""
    trap = Trap()
    async with serving(make(2 * STREAMS), trap):
        await _leave(trap, method)
        left = []
        for _ in range(4):  # what leaks does so each time; what a connection leaves, once
            before = _allocated()
            await _leave(trap, method)
            left.append((_allocated() - before) / STREAMS)
            if left[-1] < MOST_LEFT:
                return
    assert min(left) < MOST_LEFT


# ---- messages


def our_channel(address: str) -> Any:
    return open_channel(address, None, options=channel_options(max_receive_bytes=BIG))


def _zip(make: Make) -> Make:
    return functools.partial(make, compression=grpc.Compression.Gzip)


@pytest.mark.parametrize(
    ("make", "as_is"),
    [(_zip(stock), False), (ours, True), (ours_on_grpc, True)],
    ids=["zipping", "ours", "ours on grpc.aio"],
)
async def test_answers_travel_uncompressed(make: Make, as_is: bool) -> None:  # noqa: FBT001
    connect = functools.partial(grpc.aio.insecure_channel, options=AS_SENT)
    async with serving(make(), Trap(), connect) as channel:
        assert (await channel.unary_unary(ECHO)(ZEROS) == ZEROS) is as_is


@pytest.mark.parametrize(
    ("connect", "as_is"),
    [(_zip(grpc.aio.insecure_channel), False), (our_channel, True)],
    ids=["zipping", "ours"],
)
async def test_requests_travel_uncompressed(connect: Make, as_is: bool) -> None:  # noqa: FBT001
    async with serving(stock(options=AS_SENT), Trap(), connect) as channel:
        assert (await channel.unary_unary(ECHO)(ZEROS) == ZEROS) is as_is


@pytest.mark.parametrize(
    ("make", "connect"),
    [
        pytest.param(
            stock, our_channel, id="stock server", marks=trap("a server takes 4 MiB at most")
        ),
        pytest.param(
            ours,
            grpc.aio.insecure_channel,
            id="stock channel",
            marks=trap("a channel takes 4 MiB at most"),
        ),
        pytest.param(ours, our_channel, id="ours"),
        pytest.param(ours_on_grpc, our_channel, id="ours on grpc.aio"),
    ],
)
async def test_messages_may_be_larger_than_grpcs_own_limit(make: Make, connect: Make) -> None:
    message = bytes(BIG)
    async with serving(make(), Trap(), connect) as channel:
        call = channel.unary_unary(ECHO)(message)
        assert await call.code() is grpc.StatusCode.OK
        assert await call == message


async def test_every_address_of_a_service_has_its_own_limit() -> None:
    """The public one its service's; operators and probes have nothing long to say."""
    admin_method, check = "/millstream.v1.AdminService/GetServerStatus", f"/{HEALTH}/Check"
    paths = ((ECHO, BIG), (admin_method, 64 << 10), (check, 4 << 10))
    limits = {f"127.0.0.1:{free_port()}": path_and_limit for path_and_limit in paths}
    public, admin, probes = limits
    settings = ServiceSettings(
        listen=public, admin_listen=admin, health_listen=probes, metrics_listen=""
    )
    plan = ServicePlan(
        services=(SERVICE,),
        max_receive_bytes=BIG,
        load=LoadMeter(lambda: 0.5),
        open_work=dict,
    )
    service = Service(settings, "test")
    service.prepare(plan).methods.add_generic_rpc_handlers((Trap().handlers,))
    try:
        await service.listen()
        for address, (path, limit) in limits.items():
            async with our_channel(address) as channel:
                method = channel.unary_unary(path)
                fits = await method(bytes(limit)).code()  # only `echo` can use zeros
                assert fits is not grpc.StatusCode.RESOURCE_EXHAUSTED, path
                over = await refusal(method(bytes(limit + 1)))
                assert over.code is grpc.StatusCode.RESOURCE_EXHAUSTED, path
    finally:
        await service.close()


# ---- versions


def test_grpcios_packages_are_of_one_version_and_the_stubs_of_their_generators() -> None:
    """Stubs refuse to be imported beside an older grpcio; the packages are made for one another."""
    packages = {str(canonicalize_name(d.name)): d.version for d in distributions()}
    found = {name: version for name, version in packages.items() if name.startswith("grpcio")}
    generator = found.pop("grpcio-tools")  # an older one, so that clients may have an older grpcio
    parts = ("", "-health-checking", "-reflection", "-channelz", "-status")
    assert {f"grpcio{part}" for part in parts} <= found.keys()
    assert found == dict.fromkeys(found, grpc.__version__)
    stubs = {}
    for stub in Path(worker_pb2.__file__).parents[1].rglob("*_pb2_grpc.py"):
        (stubs[stub.name],) = re.findall(
            r"^GRPC_GENERATED_VERSION = '(.+)'$", stub.read_text(), re.MULTILINE
        )
    assert Path(worker_pb2_grpc.__file__).name in stubs
    assert stubs == dict.fromkeys(stubs, generator)
