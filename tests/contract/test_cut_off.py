"""RPCs that a server's stop cuts off: they end with our status, and their handlers clean up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from millstream_server.runtime.server import Server, ServerOptions
from tests.support.failures import refusal
from tests.support.waiting import EOF, until

SERVICE = "test.v1.SlowService"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


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

    async def reads_and_writes(self, _: Any, context: Any) -> None:
        await context.write(b"first")
        await self._wait()

    def handlers(self) -> Any:
        methods = {
            kind: getattr(grpc, f"{kind}_rpc_method_handler")(
                self.many if kind.endswith("stream") else self.one
            )
            for kind in KINDS
        }
        methods["written"] = grpc.stream_stream_rpc_method_handler(self.reads_and_writes)
        return grpc.method_handlers_generic_handler(SERVICE, methods)


async def _serve(slow: Slow) -> tuple[Server, int]:
    server = Server((), ServerOptions(max_receive_bytes=1 << 20))
    server.grpc.add_generic_rpc_handlers((slow.handlers(),))
    return server, await server.listen("127.0.0.1:0")


def _calls(channel: grpc.aio.Channel) -> list[Any]:
    calls: list[Any] = []
    for name in (*KINDS, "written"):
        kind = "stream_stream" if name == "written" else name
        method = getattr(channel, kind)(f"/{SERVICE}/{name}")
        calls.append(method(b"") if kind.startswith("unary") else method())
    return calls


@pytest.mark.parametrize("grace_s", [0, 0.1])
async def test_every_kind_of_rpc_is_told_why_it_ends(grace_s: float) -> None:
    slow = Slow()
    server, port = await _serve(slow)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = _calls(channel)
        ends = [asyncio.ensure_future(refusal(call)) for call in calls]
        await until(lambda: slow.begun == len(calls))
        began = time.monotonic()
        await server.stop(grace_s)
        assert grace_s * 0.9 <= time.monotonic() - began < grace_s + 0.9, "gRPC cut nobody"
        assert slow.cleaned_up == len(calls)
        for end in ends:
            failed = await end
            assert failed.code is grpc.StatusCode.UNAVAILABLE
            assert failed.reason == "UNAVAILABLE"
            assert failed.retryable
            assert "shut down" in failed.message


async def test_a_caller_who_doesnt_read_holds_nobody_up() -> None:
    """No status reaches it before what it hasn't read, so gRPC cuts it."""
    full = asyncio.Event()

    async def flood(*_: Any) -> AsyncIterator[bytes]:
        while True:
            full.set()
            yield bytes(1 << 20)

    server = Server((), ServerOptions(max_receive_bytes=1 << 20))
    server.grpc.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                SERVICE, {"Flood": grpc.unary_stream_rpc_method_handler(flood)}
            ),
        )
    )
    port = await server.listen("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: Any = channel.unary_stream
        call = method(f"/{SERVICE}/Flood")(b"")
        assert await call.read() is not EOF
        await full.wait()
        began = time.monotonic()
        await server.stop(0)
        assert time.monotonic() - began < 3
        call.cancel()
