"""Health over a real channel, and each thing that grpcio's own asyncio servicer gets wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer as StockServicer

from millstream_server.runtime.rpc import health
from millstream_server.runtime.rpc.health import ACCEPTING, LIVENESS, MAX_LISTED, HealthServicer
from millstream_testing.waiting import EOF, until
from tests.support.vendor import trap
from tests.support.wire.failures import refusal
from tests.support.wire.transports import new_server

NAME = "millstream.v1.DecodeService"
OTHER = "millstream.v1.WorkerService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
GRACE_S = 3.0


class CountingServicer(StockServicer):  # type: ignore[misc]
    left = 0  # Watches that have ended

    async def Watch(self, request: Any, context: Any) -> None:
        try:
            await super().Watch(request, context)
        finally:
            self.left += 1


class Stock:
    """grpcio's servicer behind the same calls, set up as its documentation says."""

    def __init__(self) -> None:
        self.servicer = CountingServicer()

    async def start(self) -> None:
        for name in (NAME, OTHER):
            await self.servicer.set(name, NOT_SERVING)

    async def set(self, name: str, *, serving: bool) -> None:
        await self.servicer.set(name, SERVING if serving else NOT_SERVING)

    def removed_a_watcher(self) -> bool:
        return self.servicer.left == 1

    async def close(self) -> None:
        await self.servicer.enter_graceful_shutdown()


class Ours:
    def __init__(self) -> None:
        self.servicer = HealthServicer((NAME, OTHER))

    async def start(self) -> None:
        pass

    async def set(self, name: str, *, serving: bool) -> None:
        self.servicer.set(name, serving=serving)

    def removed_a_watcher(self) -> bool:
        return self.servicer._shares.used == 1

    async def close(self) -> None:
        self.servicer.close()


def both(why: str, raises: type[Exception] = AssertionError) -> pytest.MarkDecorator:
    """Run the test with grpcio's servicer too, which fails it: ``why``."""
    broken = trap(f"grpcio-health-checking: {why}", raises)
    return pytest.mark.parametrize(
        "kind", [pytest.param(Stock, id="stock", marks=broken), pytest.param(Ours, id="ours")]
    )


@dataclass
class Running:
    health: Any
    stub: Any
    server: grpc.aio.Server
    watches: list[Any] = field(default_factory=list)

    async def check(self, name: str) -> int:
        answer = await self.stub.Check(health_pb2.HealthCheckRequest(service=name))
        return int(answer.status)

    def watch(self, name: str) -> Any:
        self.watches.append(self.stub.Watch(health_pb2.HealthCheckRequest(service=name)))
        return self.watches[-1]


@contextlib.asynccontextmanager
async def running(kind: Callable[[], Any] = Ours) -> AsyncIterator[Running]:
    health = kind()
    # Theirs needs grpc's own context.
    server: Any = new_server() if kind is Ours else grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    bind = server.bind if kind is Ours else server.add_insecure_port
    port = bind("127.0.0.1:0")
    await health.start()
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        r = Running(health, health_pb2_grpc.HealthStub(channel), server)
        try:
            yield r
        finally:
            for watch in r.watches:
                watch.cancel()
            await server.stop(None)


async def read(watch: Any) -> int:
    async with asyncio.timeout(1):
        message = await watch.read()
    assert message is not EOF
    return int(message.status)


# ---- where the stock servicer fails


@both("a fresh servicer calls the server healthy before anything is loaded")
async def test_nothing_is_serving_before_it_is_said_so(kind: Callable[[], Any]) -> None:
    async with running(kind) as r:
        assert [await r.check(name) for name in ("", NAME, OTHER)] == [NOT_SERVING] * 3


@both("List is UNIMPLEMENTED", grpc.aio.AioRpcError)
async def test_list_names_all(kind: Callable[[], Any]) -> None:
    async with running(kind) as r:
        await r.health.set(NAME, serving=True)
        answer = await r.stub.List(health_pb2.HealthListRequest())
        states = {name: status.status for name, status in answer.statuses.items()}
        assert states.keys() - {LIVENESS, ACCEPTING} == {"", NAME, OTHER}
        assert (states[NAME], states[OTHER]) == (SERVING, NOT_SERVING)


@both("of two watchers the second goes deaf when the first leaves", TimeoutError)
async def test_a_watcher_that_ends_doesnt_end_others(kind: Callable[[], Any]) -> None:
    async with running(kind) as r:
        first, second = r.watch(NAME), r.watch(NAME)
        assert [await read(first), await read(second)] == [NOT_SERVING] * 2
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first.read()
        await until(r.health.removed_a_watcher)
        await r.health.set(NAME, serving=True)
        assert await read(second) == SERVING


@both("an open Watch holds server.stop for the whole grace")
async def test_watches_do_not_hold_a_stop(kind: Callable[[], Any]) -> None:
    async with running(kind) as r:
        watches = [r.watch(name) for name in (NAME, NAME, OTHER)]
        for watch in watches:
            assert await read(watch) == NOT_SERVING
        await r.health.close()
        began = time.monotonic()
        await r.server.stop(GRACE_S)
        assert time.monotonic() - began < GRACE_S / 2


# ---- ours


async def test_liveness_is_serving_whatever_happens() -> None:
    async with running() as r:
        health: HealthServicer = r.health.servicer
        assert await r.check(LIVENESS) == SERVING
        health.set(serving=True)
        assert [await r.check(name) for name in ("", NAME, OTHER, LIVENESS)] == [SERVING] * 4
        health.set(serving=False)
        health.set(LIVENESS, serving=False)
        health.begin_drain()
        assert [await r.check(name) for name in ("", NAME, OTHER)] == [NOT_SERVING] * 3
        assert await r.check(LIVENESS) == SERVING
        names = ("", NAME, OTHER, ACCEPTING)
        assert health.states == {**dict.fromkeys(names, False), LIVENESS: True}


async def test_a_server_accepts_until_it_drains_whatever_it_serves() -> None:
    async with running() as r:
        health: HealthServicer = r.health.servicer
        assert await r.check(ACCEPTING) == SERVING
        health.set(serving=False)
        assert await r.check(ACCEPTING) == SERVING
        watch = r.stub.Watch(health_pb2.HealthCheckRequest(service=ACCEPTING))
        assert await read(watch) == SERVING
        health.begin_drain()
        assert await read(watch) == NOT_SERVING


async def test_every_watcher_gets_every_change_to_its_name_only() -> None:
    async with running() as r:
        watches = [r.watch(NAME) for _ in range(5)]
        other = r.watch(OTHER)
        for watch in (*watches, other):
            assert await read(watch) == NOT_SERVING
        for serving in (True, False, True):
            await r.health.set(NAME, serving=serving)
            expected = SERVING if serving else NOT_SERVING
            assert [await read(watch) for watch in watches] == [expected] * 5
        await r.health.set(NAME, serving=True)  # no change, no message
        await r.health.set(NAME, serving=False)
        assert [await read(watch) for watch in watches] == [NOT_SERVING] * 5
        await r.health.set(OTHER, serving=True)
        assert await read(other) == SERVING


async def test_an_unknown_name() -> None:
    async with running() as r:
        failed = await refusal(r.stub.Check(health_pb2.HealthCheckRequest(service="no.such")))
        assert failed.code is grpc.StatusCode.NOT_FOUND
        assert "List names those it knows" in failed.message
        watch = r.watch("no.such")
        assert await read(watch) == UNKNOWN
        await r.health.set("no.such", serving=True)
        assert await read(watch) == SERVING
        assert await r.check("no.such") == SERVING


async def test_a_list_too_long_is_refused() -> None:
    async with running() as r:
        health: HealthServicer = r.health.servicer
        health.set(*(f"s{i}" for i in range(MAX_LISTED - 5)), serving=True)
        assert len((await r.stub.List(health_pb2.HealthListRequest())).statuses) == MAX_LISTED
        health.set("one.more", serving=True)
        failed = await refusal(r.stub.List(health_pb2.HealthListRequest()))
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "Check" in failed.message


async def test_ended_watches_are_not_kept() -> None:
    async with running() as r:
        health: HealthServicer = r.health.servicer
        for _ in range(3):
            watches = [r.watch(f"service{i}") for i in range(40)]
            for watch in watches:
                await read(watch)
            assert health._shares.used == 40
            for watch in watches:
                watch.cancel()
            await until(lambda: health._shares.used == 0)
        assert health._watches == {}


async def test_watchers_get_the_drain_and_stay_open_until_the_close() -> None:
    async with running() as r:
        health: HealthServicer = r.health.servicer
        health.set(serving=True)
        watch, live, unknown = r.watch(NAME), r.watch(LIVENESS), r.watch("no.such")
        assert [await read(w) for w in (watch, live, unknown)] == [SERVING, SERVING, UNKNOWN]
        health.begin_drain()
        assert await read(watch) == NOT_SERVING
        health.set(NAME, serving=True)  # too late
        assert await r.check(NAME) == NOT_SERVING
        late = r.watch(NAME)
        assert await read(late) == NOT_SERVING
        assert health._shares.used == 4
        health.close()
        for w in (watch, live, unknown, late):
            failed = await refusal(w)
            assert failed.code is grpc.StatusCode.UNAVAILABLE
            assert (failed.reason, failed.retryable) == ("UNAVAILABLE", True)
            assert failed.message == "this server is shutting down"
        assert health._shares.used == 0


async def test_a_close_without_a_drain_says_not_serving_first() -> None:
    async with running() as r:
        await r.health.set(NAME, serving=True)
        watch = r.watch(NAME)
        assert await read(watch) == SERVING
        await r.health.close()
        assert await read(watch) == NOT_SERVING
        assert (await refusal(watch)).code is grpc.StatusCode.UNAVAILABLE


async def test_a_watch_after_the_close_gets_no_message() -> None:
    """After a message a channel would watch again at once, and again: a busy loop."""
    async with running() as r:
        await r.health.close()
        watch = r.watch(NAME)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await r.check(NAME) == NOT_SERVING


async def test_watchers_that_leave_as_the_server_closes_are_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as r:
        health: HealthServicer = r.health.servicer
        for _ in range(20):
            watch = r.watch(NAME)
            await read(watch)
        for watch in r.watches:
            watch.cancel()
        health.close()
        await until(lambda: health._shares.used == 0)
        assert await r.check(NAME) == NOT_SERVING
    assert [record.getMessage() for record in caplog.records] == []


# ---- what a channel makes of it


@dataclass
class Backend:
    name: bytes
    health: HealthServicer
    server: grpc.aio.Server
    port: int


@contextlib.asynccontextmanager
async def backend(name: bytes) -> AsyncIterator[Backend]:
    async def who(_request: bytes, _context: Any) -> bytes:
        return name

    health = HealthServicer((NAME,))
    health.set(serving=True)
    server = new_server()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    handlers = {"Who": grpc.unary_unary_rpc_method_handler(who, request_deserializer=bytes)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        yield Backend(name, health, server, port)
    finally:
        health.close()
        await server.stop(None)


CHECKING = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": NAME},
}


@contextlib.asynccontextmanager
async def two_backends() -> AsyncIterator[tuple[Backend, Backend, Callable[[], Any]]]:
    """Two backends and a call through a channel that checks their health."""
    async with backend(b"a") as a, backend(b"b") as b:
        target = f"ipv4:127.0.0.1:{a.port},127.0.0.1:{b.port}"
        options = [("grpc.service_config", json.dumps(CHECKING))]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            ask = channel.unary_unary(
                "/test.Echo/Who", request_serializer=bytes, response_deserializer=bytes
            )

            async def names(count: int = 20) -> set[bytes]:
                """Any error fails the test."""
                return {await ask(b"", wait_for_ready=True, timeout=10) for _ in range(count)}

            await until(lambda: _are(names, {b"a", b"b"}))
            yield a, b, names


async def _are(names: Callable[[], Any], expected: set[bytes]) -> bool:
    return bool(await names() == expected)


async def test_a_channel_leaves_a_backend_that_turns_not_serving_without_an_error() -> None:
    async with two_backends() as (a, b, names):
        a.health.set(serving=False)
        await until(lambda: _are(names, {b"b"}))
        a.health.set(serving=True)
        await until(lambda: _are(names, {b"a", b"b"}))
        b.health.begin_drain()
        await until(lambda: _are(names, {b"a"}))


async def test_a_channel_does_not_come_back_to_a_backend_whose_watches_were_ended() -> None:
    async with two_backends() as (a, _, names):
        a.health.close()  # the server itself goes on: were checking now off, it would be chosen
        await until(lambda: _are(names, {b"b"}))
        left = time.monotonic()
        while time.monotonic() - left < 2.5:  # the first retries come after 1 s and 2.6 s
            assert await names() == {b"b"}
            await asyncio.sleep(0.05)


async def test_a_name_that_can_be_none_is_refused() -> None:
    """Anyone may ask, and a Watch keeps the name for as long as it is open."""
    async with running() as r:
        request = health_pb2.HealthCheckRequest(service="x" * 257)
        for call in (r.stub.Check(request), r.stub.Watch(request)):
            refused = await refusal(call)
            assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.fields == ("service",)


async def test_watches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_WATCHES", 4)
    async with running() as r:
        for watch in (r.watch(""), r.watch("")):
            assert (await watch.read()).status == NOT_SERVING
        refused = await refusal(r.watch(""))
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.reason == "OVERLOADED"
        assert refused.message.startswith("2 health watches are open on this server, 2 of them yo")
        assert r.health.servicer._shares.used == 2


async def test_a_request_that_can_be_no_name_is_not_taken() -> None:
    """Its callers have no key; the server takes megabytes for other methods."""
    async with running() as r:
        request = health_pb2.HealthCheckRequest(service="x" * 5000)
        for call in (r.stub.Check(request), r.stub.Watch(request)):
            refused = await refusal(call)
            assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "5003 bytes" in refused.message and "4096" in refused.message  # noqa: PT018
