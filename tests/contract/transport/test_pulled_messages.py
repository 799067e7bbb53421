"""A call asks its source for messages when it can be written, and for no more than one then."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from millstream_server.runtime.errors import Code, UnavailableError
from millstream_server.runtime.rpc.call import Call
from tests.support.wire.raw_http2 import Kind, Setting, Wire, connected, settings, window_update
from tests.support.wire.transports import serving

_SERVICE = "test.v1.Pulled"
_PATH = f"/{_SERVICE}/Pull"


class Pieces:
    """A source: what is put in gathers until it is asked, and is one message then."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.gathers = False
        self.over = False
        self.ends = False
        self.fault: Exception | None = None
        self.asked = 0
        self._pieces: deque[bytes] = deque()

    def put(self, piece: bytes, *, last: bool = False) -> None:
        self._pieces.append(piece)
        self.ends = last
        self.call.ready()

    def next(self) -> bytes | None:
        self.asked += 1
        self.gathers = False
        if self.fault is not None:
            raise self.fault
        if not self._pieces:
            return None
        message = b"".join(self._pieces)
        self._pieces.clear()
        self.over = self.ends
        return message


class Service:
    """Sends what the test puts into the source of each call."""

    def __init__(self) -> None:
        self.sources: asyncio.Queue[Pieces] = asyncio.Queue()

    async def pull(self, _: bytes, call: Call) -> None:
        source = Pieces(call)
        self.sources.put_nowait(source)
        await call.send_from(source)

    def handlers(self) -> dict[str, Any]:
        return {"Pull": grpc.unary_stream_rpc_method_handler(self.pull, bytes, bytes)}


@asynccontextmanager
async def _served() -> AsyncIterator[tuple[Service, Wire]]:
    service = Service()
    async with serving({_SERVICE: service.handlers()}) as server, connected(server.port) as wire:
        yield service, wire


async def _begin(service: Service, wire: Wire) -> tuple[Any, Pieces]:
    rpc = wire.rpc(_PATH)
    rpc.send(b"", end=True)
    return rpc, await asyncio.wait_for(service.sources.get(), 5)


async def test_what_comes_while_there_is_no_window_is_one_message() -> None:
    async with _served() as (service, wire):
        wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 8}))
        await wire.answered()
        rpc, source = await _begin(service, wire)
        source.put(b"abc")  # with its head it fills the window
        await wire.until(lambda: len(rpc.messages) == 1)
        for piece in (b"d", b"e", b"f"):
            source.put(piece)
            await wire.answered()
        assert source.gathers
        asked = source.asked
        source.put(b"g", last=True)
        await wire.answered()
        assert source.asked == asked
        wire.send(window_update(rpc.stream, 1 << 10))
        assert await rpc.code() == Code.OK
        assert rpc.messages == [b"abc", b"defg"]


async def test_a_message_larger_than_the_window_goes_in_parts_and_the_next_one_after_it() -> None:
    async with _served() as (service, wire):
        wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 100}))
        await wire.answered()
        rpc, source = await _begin(service, wire)
        source.put(bytes(300))
        await wire.until(lambda: len(rpc.received) == 100)
        source.put(b"next")
        source.put(b"!", last=True)
        await wire.answered()
        assert (source.asked, source.over) == (1, False)
        wire.send(window_update(rpc.stream, 150))
        await wire.until(lambda: len(rpc.received) == 250)
        wire.send(window_update(rpc.stream, 1 << 10))
        assert await rpc.code() == Code.OK
        assert rpc.messages == [bytes(300), b"next!"]


async def test_calls_of_one_turn_of_the_loop_are_one_write() -> None:
    async with _served() as (service, wire):
        begun = [await _begin(service, wire) for _ in range(5)]
        for _, source in begun:
            source.put(b"token")
            source.put(b"s", last=True)
        for rpc, source in begun:
            assert await rpc.code() == Code.OK
            assert rpc.messages == [b"tokens"]
            assert source.asked == 1


async def test_a_call_that_was_ready_before_it_sends_is_asked() -> None:
    service = Service()

    async def late(_: bytes, call: Call) -> None:
        source = Pieces(call)
        source.put(b"early", last=True)
        await asyncio.sleep(0)
        await call.send_from(source)

    handlers = {"Pull": grpc.unary_stream_rpc_method_handler(late, bytes, bytes)}
    async with serving({_SERVICE: handlers}) as server, connected(server.port) as wire:
        rpc = wire.rpc(_PATH)
        rpc.send(b"", end=True)
        assert await rpc.code() == Code.OK
        assert rpc.messages == [b"early"]
    assert service.sources.empty()


async def test_what_a_source_raises_ends_its_call_alone() -> None:
    async with _served() as (service, wire):
        broken, normal = [await _begin(service, wire) for _ in range(2)]
        broken[1].fault = UnavailableError("no more")
        broken[1].put(b"lost")
        normal[1].put(b"kept", last=True)
        assert await broken[0].code() == Code.UNAVAILABLE
        assert await normal[0].code() == Code.OK
        assert (broken[0].messages, normal[0].messages) == ([], [b"kept"])


async def test_a_source_is_not_asked_after_its_caller_left() -> None:
    async with _served() as (service, wire):
        wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 0}))
        await wire.answered()
        rpc, source = await _begin(service, wire)
        source.put(b"unread")
        await wire.answered()
        rpc.reset()
        await wire.answered()
        wire.send(window_update(0, 1 << 10))
        source.put(b"late")
        await wire.answered()
        assert source.asked == 0
        assert wire.of(Kind.GOAWAY) == []
