"""What our channel and server arguments do on real sockets, with the times scaled down."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from millstream_server.runtime.rpc import channel as arguments
from millstream_server.runtime.rpc.channel import (
    ChannelArguments,
    channel_options,
    open_channel,
    server_options,
)
from millstream_server.runtime.rpc.grpc_server import GrpcServer, RpcInterceptor
from millstream_testing.waiting import until
from tests.support.vendor import trap
from tests.support.wire.echo_service import SERVICE, Echoing, answer, call, echoing
from tests.support.wire.failures import failure, refusal
from tests.support.wire.relay import Relay
from tests.support.wire.transports import new_server

_LIMIT = 1 << 20
_BIDI = f"/{SERVICE}/Bidi"
_SOON_S = 3.0
"""gRPC leaves a second between pings, however short the interval we ask for; and one for luck."""
_HI = StringValue(value="hi").SerializeToString()


async def _open_stream(channel: Any) -> Any:
    stream = channel.stream_stream(_BIDI)()
    await _echo(stream)
    return stream


async def _echo(stream: Any) -> None:
    await stream.write(_HI)
    assert StringValue.FromString(await stream.read()).value == "hi anonymous anonymous"


# ---- a peer that vanishes ------------------------------------------------------------------------


_KEEPALIVE_ALONE: ChannelArguments = [
    ("grpc.keepalive_time_ms", 200),
    ("grpc.keepalive_timeout_ms", 200),
]
_SET_TIMEOUT_HAS_NO_EFFECT = trap(
    "keepalive_timeout_ms alone leaves gRPC waiting a minute for an ack",
    (TimeoutError, AssertionError),
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(_KEEPALIVE_ALONE, id="stock", marks=_SET_TIMEOUT_HAS_NO_EFFECT),
        pytest.param(
            channel_options(max_receive_bytes=_LIMIT, keepalive_s=0.2, keepalive_timeout_s=0.2),
            id="ours",
        ),
    ],
)
async def test_a_client_notices_a_server_that_vanished(options: ChannelArguments) -> None:
    async with (
        echoing() as served,
        Relay(served.port).laid() as wire,
        open_channel(f"127.0.0.1:{wire.port}", None, options=options) as channel,
    ):
        stream = await _open_stream(channel)
        wire.fall_silent()
        async with asyncio.timeout(_SOON_S):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
    assert failure(caught.value).code is grpc.StatusCode.UNAVAILABLE


async def test_a_server_may_be_late_to_greet() -> None:
    """Its event loop is busy, or it is far away: TLS has several round trips."""
    async with (
        echoing() as served,
        Relay(served.port).laid() as wire,
        open_channel(
            f"127.0.0.1:{wire.port}", None, options=channel_options(max_receive_bytes=_LIMIT)
        ) as channel,
    ):
        wire.fall_silent()
        asking = asyncio.ensure_future(answer(call(channel, "Unary")))
        await asyncio.sleep(2.5 * arguments.RECONNECT_FIRST_S)
        wire.flow()
        assert await asking == "hi anonymous anonymous"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(_KEEPALIVE_ALONE, id="stock", marks=_SET_TIMEOUT_HAS_NO_EFFECT),
        pytest.param(
            server_options(max_receive_bytes=_LIMIT, keepalive_s=0.2, keepalive_timeout_s=0.2),
            id="ours",
        ),
    ],
)
async def test_a_server_frees_what_a_vanished_client_held(options: ChannelArguments) -> None:
    ended = asyncio.Event()

    async def hold(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                yield request
        finally:
            ended.set()

    server = grpc.aio.server(options=options)
    handlers = {"Bidi": grpc.stream_stream_rpc_method_handler(hold)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with (
        Relay(port).laid() as wire,
        grpc.aio.insecure_channel(f"127.0.0.1:{wire.port}") as channel,
    ):
        method: Any = channel.stream_stream
        stream = method(_BIDI)()
        await stream.write(_HI)
        await stream.read()
        wire.fall_silent()
        try:
            await until(ended.is_set, within_s=_SOON_S)
        finally:
            await server.stop(0)


# ---- pings are welcome ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            [
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
            id="stock",
            marks=trap("the macro's name is no argument; Core's is shorter", pytest.fail.Exception),
        ),
        pytest.param(server_options(max_receive_bytes=_LIMIT, min_ping_interval_s=0.5), id="ours"),
    ],
)
async def test_a_server_takes_our_clients_pings_on_an_idle_connection(
    options: ChannelArguments,
) -> None:
    mine = channel_options(max_receive_bytes=_LIMIT, keepalive_s=0.5, keepalive_timeout_s=1)
    assert arguments.KEEPALIVE_S / arguments.MIN_PING_INTERVAL_S == 2
    server = GrpcServer(RpcInterceptor(), [*options, ("grpc.http2.max_ping_strikes", 1)])
    async with (
        echoing(server=server) as served,
        open_channel(served.address, None, options=mine) as channel,
    ):
        assert await answer(call(channel, "Unary"))
        ready = grpc.ChannelConnectivity.READY
        with pytest.raises(TimeoutError):  # a ping a second: by now there'd have been two strikes
            async with asyncio.timeout(3.5):
                await channel.wait_for_state_change(ready)
        assert channel.get_state() is ready


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.both_transports
async def test_metadata_has_a_limit() -> None:
    async with echoing() as served, served.channel() as channel:
        fits = [("baggage", "x" * 8192), ("authorization", "y" * 4096)]
        assert await answer(call(channel, "Unary", metadata=fits))
        for size in (17 << 10, 60 << 10):
            failed = await refusal(call(channel, "Unary", metadata=[("baggage", "x" * size)]))
            assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert served.echo.reached == 1


@pytest.mark.both_transports
async def test_a_stream_too_many_waits_in_the_client() -> None:
    server = new_server(max_streams=2)
    async with echoing(server=server) as served, served.channel() as channel:
        streams = [await _open_stream(channel) for _ in range(2)]
        waiting = asyncio.ensure_future(answer(call(channel, "Unary")))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        assert served.echo.reached == 2
        streams[0].cancel()
        assert await waiting == "hi anonymous anonymous"
        streams[1].cancel()


# ---- age -----------------------------------------------------------------------------------------


async def _until_told_to_leave(channel: Any) -> None:
    await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)


def _aged(grace_s: float) -> Any:
    return new_server(max_connection_age_s=0.3, max_connection_age_grace_s=grace_s)


async def test_an_aged_connections_streams_go_on_and_new_rpcs_get_a_new_one() -> None:
    async with echoing(server=_aged(0)) as served, served.channel() as channel:
        stream = await _open_stream(channel)
        await _until_told_to_leave(channel)
        assert await answer(call(channel, "Unary"))
        await _echo(stream)
        stream.cancel()


async def test_after_the_grace_an_aged_connections_streams_are_cut() -> None:
    async with echoing(server=_aged(0.2)) as served, served.channel() as channel:
        stream = await _open_stream(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    assert failure(caught.value).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.both_transports
async def test_without_an_age_there_is_none() -> None:
    names = {name for name, _ in server_options(max_receive_bytes=_LIMIT)}
    assert not [name for name in names if "age" in name.split("_")]
    async with echoing() as served, served.channel() as channel:
        assert await answer(call(channel, "Unary"))


# ---- proxies -------------------------------------------------------------------------------------


def _stock_channel(served: Echoing) -> Any:
    return grpc.aio.insecure_channel(served.address)


@pytest.mark.parametrize(
    "open_one",
    [
        pytest.param(
            _stock_channel,
            id="stock",
            marks=trap(
                "gRPC sends loopback connections through the environment's proxy",
                grpc.aio.AioRpcError,
            ),
        ),
        pytest.param(Echoing.channel, id="ours"),
    ],
)
async def test_loopback_needs_no_proxy(open_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with echoing() as served, open_one(served) as channel:
        assert await answer(call(channel, "Unary")) == "hi anonymous anonymous"


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:50051", True),
        ("127.1.2.3:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("dns:localhost:50051", True),
        ("ipv4:127.0.0.1:50051", True),
        ("ipv6:[::1]:50051", True),
        ("10.0.0.1:50051", False),
        ("localhost.example:50051", False),
        ("dns:///workers.millstream:50051", False),
        ("ipv4:10.0.0.1:50051", False),
        ("[fd00::1]:50051", False),
    ],
)
def test_what_counts_as_loopback(address: str, loopback: bool) -> None:  # noqa: FBT001
    assert arguments.is_loopback(address) is loopback


# ---- a burst while the server is busy ------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            [],
            id="stock",
            marks=trap(
                "beyond 1,000 RPCs that wait for the event loop gRPC drops some", AssertionError
            ),
        ),
        pytest.param(server_options(max_receive_bytes=_LIMIT), id="ours"),
    ],
)
async def test_a_burst_that_meets_a_busy_server_waits(options: ChannelArguments) -> None:
    async def unary(request: bytes, _: Any) -> bytes:
        return request

    server = grpc.aio.server(options=options)
    handlers = {"Unary": grpc.unary_unary_rpc_method_handler(unary)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:  # its threads don't need the loop
        method: Any = channel.unary_unary(f"/{SERVICE}/Unary")  # type: ignore[call-arg]
        await asyncio.to_thread(method, b"connected")
        calls = [method.future(b"hi") for _ in range(3500)]
        time.sleep(0.5)  # noqa: ASYNC251 - this is the busy loop
        codes = await asyncio.to_thread(lambda: Counter(call.code().name for call in calls))
    await server.stop(0)
    assert codes == {"OK": 3500}
