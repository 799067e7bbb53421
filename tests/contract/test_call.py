"""What a servicer learns of its RPC through a `Call`, and what it can do to it, over grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from millstream_server.runtime.errors import Code, OverloadedError, StatusError
from millstream_server.runtime.rpc.call import Call
from millstream_testing.waiting import EOF, until
from tests.support.wire.failures import refusal
from tests.support.wire.transports import current, new_server

pytestmark = pytest.mark.both_transports

SERVICE = "test.v1.Any"
Unary = Callable[[bytes, Call], Awaitable[bytes]]
Stream = Callable[[AsyncIterator[bytes], Call], AsyncIterator[bytes]]


async def _unused(_requests: AsyncIterator[bytes], _call: Call) -> AsyncIterator[bytes]:
    yield b""


@contextlib.asynccontextmanager
async def serving(unary: Unary | None = None, stream: Stream = _unused) -> AsyncIterator[Any]:
    server = new_server()
    methods: dict[str, Any] = {"Stream": grpc.stream_stream_rpc_method_handler(stream)}
    if unary is not None:
        methods["Unary"] = grpc.unary_unary_rpc_method_handler(unary)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def test_a_servicer_sees_what_the_rpc_came_with() -> None:
    seen: list[Any] = []

    async def look(request: bytes, call: Call) -> bytes:
        seen.append((call.method, dict(call.metadata)["key"], call.peer, call.certificate_names))
        assert call.caller_key == "ipv4:127.0.0.1"
        return request

    async with serving(look) as channel:
        assert (
            await channel.unary_unary(f"/{SERVICE}/Unary")(b"a", metadata=(("key", "v"),)) == b"a"
        )
    ((method, value, peer, names),) = seen
    assert method == f"/{SERVICE}/Unary"
    assert value == "v"
    assert peer.startswith("ipv4:127.0.0.1:")
    assert names is None


@pytest.mark.parametrize("limit_s", [None, 30])
async def test_the_time_left_is_until_the_callers_deadline(limit_s: float | None) -> None:
    async def look(_request: bytes, call: Call) -> bytes:
        return str(call.time_left_s).encode()

    async with serving(look) as channel:
        left = await channel.unary_unary(f"/{SERVICE}/Unary")(b"", timeout=limit_s)
    if limit_s is None:
        assert left == b"None"
    else:
        assert 25 < float(left) < 31  # gRPC may round a deadline up on the wire


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (None, grpc.StatusCode.OK),
        (OverloadedError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (StatusError(Code.NOT_FOUND, "none"), grpc.StatusCode.NOT_FOUND),
        (ValueError("secret"), grpc.StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("method", ["Unary", "Stream"])
async def test_trailers_travel_with_every_status(
    method: str, failure: Exception | None, code: grpc.StatusCode
) -> None:
    async def once(_request: bytes, call: Call) -> bytes:
        call.add_trailer("text", "a")
        call.add_trailer("bytes-bin", b"\x00")
        if failure is not None:
            raise failure
        return b"done"

    async def stream(requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await once(request, call)

    async with serving(once, stream) as channel:
        if method == "Unary":
            call = channel.unary_unary(f"/{SERVICE}/Unary")(b"")
        else:
            call = channel.stream_stream(f"/{SERVICE}/Stream")()
            await call.write(b"")
            await call.done_writing()
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not EOF:
                    pass
        assert await call.code() is code
        trailers = dict(await call.trailing_metadata())
    assert (trailers["text"], trailers["bytes-bin"]) == ("a", b"\x00")
    assert ("grpc-status-details-bin" in trailers) == (
        failure is not None and not isinstance(failure, StatusError)
    )


class Held:
    """A handler that waits until it is cancelled, and then cleans up."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.cleaned_up = 0

    async def unary(self, _request: bytes, call: Call) -> bytes:
        self.calls.append(call)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.cleaned_up += 1
        return b""

    async def stream(self, requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        yield b"first"
        self.calls.append(call)
        try:
            async for _ in requests:
                pass
        finally:
            await asyncio.sleep(0)
            self.cleaned_up += 1


@pytest.mark.parametrize("method", ["Unary", "Stream"])
async def test_cancel_ends_the_rpc_with_cancelled(method: str) -> None:
    held = Held()
    async with serving(held.unary, held.stream) as channel:
        if method == "Unary":
            started = asyncio.ensure_future(refusal(channel.unary_unary(f"/{SERVICE}/Unary")(b"")))
        else:
            call = channel.stream_stream(f"/{SERVICE}/Stream")()
            assert await call.read() == b"first"
            started = asyncio.ensure_future(refusal(call))
        await until(lambda: len(held.calls) == 1)
        held.calls[0].cancel()
        held.calls[0].cancel()
        failed = await started
        assert failed.code is grpc.StatusCode.CANCELLED
        assert failed.reason == "CANCELLED"
        assert held.cleaned_up == 1
        held.calls[0].cancel()  # it has ended: no effect


async def test_cancel_after_the_last_response_changes_nothing() -> None:
    calls: list[Call] = []

    async def once(request: bytes, call: Call) -> bytes:
        calls.append(call)
        return request

    async with serving(once) as channel:
        assert await channel.unary_unary(f"/{SERVICE}/Unary")(b"a") == b"a"
        calls[0].cancel()
        assert await channel.unary_unary(f"/{SERVICE}/Unary")(b"b") == b"b"


async def test_a_stream_of_requests_ends_once_and_stays_ended() -> None:
    ends: list[object] = []

    async def stream(requests: AsyncIterator[bytes], _call: Call) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
        ends.extend([await anext(requests, None), [r async for r in requests]])

    async with serving(None, stream) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Stream")()
        await call.write(b"a")
        assert await call.read() == b"a"
        await call.done_writing()
        assert await call.read() is EOF
        assert await call.code() is grpc.StatusCode.OK
    assert ends == [None, []]


async def test_a_servicer_may_learn_that_its_caller_sends_no_more() -> None:
    seen: list[bool] = []

    async def look(requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        first = await anext(requests)
        await until(lambda: call.all_read or current() == "grpc")
        seen.append(call.all_read)
        assert [message async for message in requests] == []
        yield first

    async def wait(requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        yield await anext(requests)
        seen.append(call.all_read)  # the caller has not closed its side

    async with serving(stream=look) as channel:
        call = channel.unary_stream(f"/{SERVICE}/Stream")(b"a")
        assert [message async for message in call] == [b"a"]
    async with serving(stream=wait) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Stream")()
        await call.write(b"a")
        assert await call.read() == b"a"
        assert await call.read() == EOF
    assert seen == [current() == "h2", False]
