"""RPCs that a server's stop cuts off: they end with our status, and their handlers clean up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from millstream.v1 import worker_pb2
from millstream_server.runtime.lifecycle import server as module
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.rpc.grpc_server import GrpcServer
from millstream_server.runtime.rpc.limits import RpcLimits
from millstream_server.runtime.telemetry.counts import LoadMeter
from millstream_testing.waiting import EOF, until
from tests.support.telemetry.logged import fields_of
from tests.support.wire import transports
from tests.support.wire.failures import Failure, refusal

pytestmark = pytest.mark.both_transports

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
"""One that reflection can describe; its methods are ours."""
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


PLAIN = ServerOptions(max_receive_bytes=1 << 20)


class Slow:
    """Handlers of every kind that never end by themselves."""

    def __init__(self) -> None:
        self.begun = 0
        self.cleaned_up = 0

    async def _wait(self) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # as real cleaning up does
            self.cleaned_up += 1

    async def one(self, request: Any, context: Any) -> bytes:
        await self._wait()
        return b""

    async def many(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await self._wait()

    def handlers(self) -> Any:
        methods = {
            kind: getattr(grpc, f"{kind}_rpc_method_handler")(
                self.many if kind.endswith("stream") else self.one
            )
            for kind in KINDS
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)


def _layered() -> ServerOptions:
    """With the layers of a Processor that has no keys."""
    return ServerOptions(max_receive_bytes=1 << 20, limits=RpcLimits(), load=LoadMeter(lambda: 0.0))


@contextlib.asynccontextmanager
async def _serving(
    handlers: Any, options: ServerOptions = PLAIN
) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    """Serve until the test has stopped it, or failed."""
    server = Server((SERVICE,), replace(options, clients=transports.clients()))
    server.methods.add_generic_rpc_handlers((handlers,))
    port = await server.listen("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield server, channel
        finally:
            await server.stop(0)


def _calls(channel: grpc.aio.Channel) -> list[Any]:
    calls: list[Any] = []
    for kind in KINDS:
        method = getattr(channel, kind)(f"/{SERVICE}/{kind}")
        calls.append(method(b"") if kind.startswith("unary") else method())
    return calls


def _calls_without_message(channel: Any) -> list[Any]:
    """Call methods that take one message, and send none."""
    path = f"/{SERVICE}/unary"
    return [channel.stream_unary(f"{path}_unary")(), channel.stream_stream(f"{path}_stream")()]


def _was_told_why(failed: Failure) -> None:
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert failed.reason == "UNAVAILABLE"
    assert failed.retryable
    assert "shut down" in failed.message


@pytest.mark.parametrize("grace_s", [0, 0.1])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(_layered(), id="layered"),
    ],
)
async def test_every_kind_of_rpc_is_told_why_it_ends(
    options: ServerOptions, grace_s: float
) -> None:
    slow = Slow()
    async with _serving(slow.handlers(), options) as (server, channel):
        calls = _calls(channel)
        waiting = _calls_without_message(channel)
        ends = [asyncio.ensure_future(refusal(call)) for call in calls + waiting]
        await until(lambda: slow.begun == len(calls))
        await until(lambda: server._open_calls.count == len(ends))
        began = time.monotonic()
        await server.stop(grace_s)
        assert grace_s * 0.9 <= time.monotonic() - began < grace_s + 0.9, "the transport cut nobody"
        assert (slow.begun, slow.cleaned_up) == (len(calls), len(calls))
        for end in ends:
            _was_told_why(await end)


class Stubborn:
    """A handler whose clean-up takes as long as the test likes, whoever cancels it."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.cleaned_up = False

    async def hold(self, request: Any, context: Any) -> bytes:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            while not self.may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.may_end.wait()
            self.cleaned_up = True
        return b""

    def handlers(self) -> Any:
        hold = grpc.unary_unary_rpc_method_handler(self.hold)
        return grpc.method_handlers_generic_handler(SERVICE, {"Hold": hold})


async def _transport_has_stopped(server: Server) -> None:
    transport = server._transport
    if isinstance(transport, GrpcServer):
        await transport._server.wait_for_termination()
    else:
        await until(lambda: not transport.connections)


@contextlib.asynccontextmanager
async def _stopping(stubborn: Stubborn) -> AsyncIterator[asyncio.Future[None]]:
    """Stop a server without grace whose handler cleans up, until its transport has stopped."""
    async with _serving(stubborn.handlers()) as (server, channel):
        method: Any = channel.unary_unary
        call = method(f"/{SERVICE}/Hold")(b"")
        await stubborn.begun.wait()
        stopping = asyncio.ensure_future(server.stop(0))
        await _transport_has_stopped(server)
        assert (await refusal(call)).code is grpc.StatusCode.UNAVAILABLE
        try:
            yield stopping
        finally:
            stubborn.may_end.set()
            await asyncio.wait({stopping})
            await until(lambda: not server._open_calls.count)


async def test_a_clean_up_that_outlasts_the_transports_grace_is_awaited() -> None:
    stubborn = Stubborn()
    async with _stopping(stubborn) as stopping:
        done, _ = await asyncio.wait({stopping}, timeout=0.2)
        assert not done, "its handler still cleans up"
        stubborn.may_end.set()
        await stopping
        assert stubborn.cleaned_up


async def test_a_clean_up_that_never_ends_is_left_and_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_HANDLERS_S", 0.1)
    stubborn = Stubborn()
    async with _stopping(stubborn) as stopping:
        await asyncio.wait_for(stopping, 5)
        assert not stubborn.cleaned_up
        (line,) = [r for r in caplog.records if r.message == "handlers still clean up"]
        assert fields_of(line) == {"open": 1}


async def test_a_handler_that_is_sending_is_told_too() -> None:
    """It is cut in the middle of a write, which is finished before the status is sent."""

    async def flood(*_: Any) -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 18)

    handlers = {"Flood": grpc.unary_stream_rpc_method_handler(flood)}
    flooding = grpc.method_handlers_generic_handler(SERVICE, handlers)
    async with _serving(flooding) as (server, channel):
        method: Any = channel.unary_stream
        call = method(f"/{SERVICE}/Flood")(b"")

        async def read_all() -> Failure:
            for _ in range(10):
                assert len(await call.read()) == 1 << 18
            flows.set()
            return await refusal(call)

        flows = asyncio.Event()
        reading = asyncio.ensure_future(read_all())
        await flows.wait()
        await server.stop(0)
        _was_told_why(await reading)


async def test_a_caller_who_doesnt_read_holds_nobody_up() -> None:
    """No status reaches it before what it hasn't read, so it is cut."""
    full = asyncio.Event()

    async def flood(*_: Any) -> AsyncIterator[bytes]:
        while True:
            full.set()
            yield bytes(1 << 20)

    handlers = {"Flood": grpc.unary_stream_rpc_method_handler(flood)}
    flooding = grpc.method_handlers_generic_handler(SERVICE, handlers)
    async with _serving(flooding) as (server, channel):
        method: Any = channel.unary_stream
        call = method(f"/{SERVICE}/Flood")(b"")
        assert await call.read() is not EOF
        await full.wait()
        began = time.monotonic()
        await server.stop(0)
        assert time.monotonic() - began < 3
        call.cancel()
