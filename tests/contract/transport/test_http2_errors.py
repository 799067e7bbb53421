"""What the transport does with clients that break the rules of HTTP/2 (the table: see `case`).

One server has all cases. Beside each, an RPC that has been open since the first one goes on.
"""

from __future__ import annotations

import inspect
import re
import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from millstream_testing.waiting import until
from tests.contract.transport.case import CHAT, UNARY, Case, Scope, hang, open_stream
from tests.contract.transport.frame_cases import FRAME_CASES
from tests.contract.transport.stream_cases import STREAM_CASES
from tests.support.wire.raw_http2 import (
    PREFACE,
    ErrorCode,
    Frame,
    Kind,
    Rpc,
    Setting,
    Wire,
    connected,
    data,
    frame,
    goaway,
    message,
    settings,
    window_update,
)
from tests.support.wire.rpc_kinds import SERVICE, Kinds
from tests.support.wire.transports import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLOOD = f"/{SERVICE}/Generator"
_WINDOW = 65_535
"""Of a stream and of a connection, until somebody changes it."""


@pytest.fixture(scope="module")
def kinds() -> Kinds:
    return Kinds()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(kinds: Kinds) -> AsyncIterator[Served]:
    async with serving({SERVICE: kinds.by_name()}, max_streams=20) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbour(server: Served) -> AsyncIterator[Rpc]:
    async with connected(server.port) as wire:
        yield wire.rpc(CHAT)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def unharmed(
    server: Served, neighbour: Rpc, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[None]:
    """Check after each test: the neighbour is served, no handler is left, no error was logged."""
    yield
    neighbour.send(b"still there")
    assert await neighbour.next() == b"still there"
    await until(lambda: server.open_calls == 1)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def _served(wire: Wire) -> None:
    """Run an RPC to its end."""
    rpc = wire.rpc(UNARY)
    rpc.send(b"", end=True)
    assert await rpc.code() == 0, str(wire)
    assert rpc.messages == [b"answer"]


@pytest.mark.parametrize("case", [*FRAME_CASES, *STREAM_CASES], ids=lambda case: case.name)
async def test_rules(case: Case, server: Served) -> None:
    async with connected(server.port, first=case.first) as wire:
        sent = case.script(wire)
        if inspect.isawaitable(sent):
            await sent
        else:
            wire.send(sent)
        match case.scope:
            case Scope.NOTHING:
                await _served(wire)
                resets = {f.error_code for f in wire.frames if f.kind == Kind.RST_STREAM}
                assert resets <= {ErrorCode.NO_ERROR}  # after a status: send no more
            case Scope.STREAM:
                broken = await wire.first(Kind.RST_STREAM, case.stream)
                assert broken.error_code is case.code
                await _served(wire)
            case Scope.CONNECTION:
                said = await wire.first(Kind.GOAWAY)
                assert said.error_code is case.code
                assert re.search(r"[a-z]{4}", said.payload[8:].decode()), "no reason"
                await wire.until_closed()
            case Scope.CLOSED:
                await wire.until_closed()
                assert {f.error_code for f in wire.of(Kind.GOAWAY)} <= {case.code}


# ---- streams -------------------------------------------------------------------------------------


async def test_streams_beyond_the_announced_number_are_refused(server: Served) -> None:
    async with connected(server.port) as wire:
        announced = _settings_of(await wire.first(Kind.SETTINGS))
        count = announced[Setting.MAX_CONCURRENT_STREAMS]
        assert count == 20
        rpcs = [wire.rpc(CHAT) for _ in range(count + 1)]
        refused = await wire.first(Kind.RST_STREAM, rpcs[-1].stream)
        assert refused.error_code is ErrorCode.REFUSED_STREAM
        rpcs[0].reset()
        await _served(wire)
        for rpc in rpcs[1:-1]:
            rpc.send(b"hi")
            assert await rpc.next() == b"hi"


def _settings_of(received: Frame) -> dict[int, int]:
    return dict(struct.iter_unpack(">HL", received.payload))


async def test_a_clients_goaway_ends_no_open_rpc(server: Served) -> None:
    async with connected(server.port) as wire:
        rpc = wire.rpc(CHAT)
        rpc.send(b"one")
        assert await rpc.next() == b"one"
        wire.send(goaway())
        rpc.send(b"two", end=True)
        assert await rpc.next() == b"two"
        assert await rpc.code() == 0
        await wire.until_closed()


async def test_a_connection_that_is_cut_ends_its_handlers(server: Served, kinds: Kinds) -> None:
    before = kinds.cancelled
    async with connected(server.port) as wire:
        wire.send(hang(wire, 1), hang(wire, 3))
        await until(lambda: server.open_calls == 3)
        wire.abort()
        await until(lambda: kinds.cancelled == before + 2)


# ---- flow control --------------------------------------------------------------------------------


def _flood(wire: Wire) -> Rpc:
    """Open an RPC whose responses don't end."""
    rpc = wire.rpc(FLOOD)
    rpc.send(b"flood", end=True)
    return rpc


async def _settled(rpc: Rpc) -> int:
    """Return how many bytes have come when the server has seen all that was sent."""
    await rpc.wire.answered()
    return len(rpc.received)


async def test_responses_follow_the_stream_window_to_the_byte(server: Served) -> None:
    first = PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: 0})
    async with connected(server.port, first=first) as wire:
        rpc = _flood(wire)
        await rpc.headers()
        assert await _settled(rpc) == 0
        wire.send(window_update(rpc.stream, 3))
        await wire.until(lambda: len(rpc.received) == 3)
        wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 5}))
        await wire.until(lambda: len(rpc.received) == 8)
        assert await _settled(rpc) == 8


async def test_new_settings_are_acknowledged_before_responses_use_them(server: Served) -> None:
    """gRPC's C core counts with its old window until then, and ends the RPC."""
    first = PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: 0})
    async with connected(server.port, first=first) as wire:
        rpc = _flood(wire)
        await _settled(rpc)
        before = len(wire.frames)
        wire.send(window_update(rpc.stream, 3), settings({Setting.INITIAL_WINDOW_SIZE: 5}))
        await wire.until(lambda: len(rpc.received) == 8)
        kinds = [f.kind for f in wire.frames[before:]]
        assert kinds == [Kind.DATA, Kind.SETTINGS, Kind.DATA]


async def test_a_window_may_go_below_zero(server: Served) -> None:
    async with connected(server.port) as wire:
        wire.send(window_update(0, 1 << 20))
        rpc = _flood(wire)
        await wire.until(lambda: len(rpc.received) == _WINDOW)
        wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 0}))
        wire.send(window_update(rpc.stream, _WINDOW))
        assert await _settled(rpc) == _WINDOW
        wire.send(window_update(rpc.stream, 100))
        await wire.until(lambda: len(rpc.received) == _WINDOW + 100)
        assert await _settled(rpc) == _WINDOW + 100


async def test_responses_share_the_connections_window(server: Served) -> None:
    first = PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: 1 << 20})
    async with connected(server.port, first=first) as wire:
        rpcs = [_flood(wire), _flood(wire)]
        await wire.until(lambda: sum(len(rpc.received) for rpc in rpcs) == _WINDOW)
        wire.send(window_update(0, 50_000))
        await wire.until(lambda: sum(len(rpc.received) for rpc in rpcs) == _WINDOW + 50_000)
        assert all([await _settled(rpc) for rpc in rpcs])  # neither starves the other
        assert sum(len(rpc.received) for rpc in rpcs) == _WINDOW + 50_000


async def test_no_frame_is_longer_than_the_client_allows(server: Served) -> None:
    async with connected(server.port) as wire:
        rpc = _flood(wire)
        await wire.until(lambda: len(rpc.received) == _WINDOW)
        assert max(len(f.payload) for f in wire.frames) <= 1 << 14


async def test_responses_obey_the_clients_header_table(server: Served) -> None:
    first = PREFACE + settings({Setting.HEADER_TABLE_SIZE: 0})
    async with connected(server.port, first=first) as wire:
        wire.decoder.max_allowed_table_size = 0
        for _ in range(3):
            await _served(wire)


async def test_requests_beyond_the_window_end_the_connection(server: Served) -> None:
    """h2 sees the stream's window too as the connection's matter, as RFC 9113 5.4.1 allows."""
    async with connected(server.port) as wire:
        wire.send(open_stream(wire), data(1, message(b"hang") + message(b"", length=1 << 20)))
        chunk = bytes(1 << 14)
        for _ in range(2000):
            if wire.closed or wire.of(Kind.GOAWAY):
                break
            wire.send(data(1, chunk))
            await wire.drained()
        assert (await wire.first(Kind.GOAWAY)).error_code is ErrorCode.FLOW_CONTROL_ERROR
        await wire.until_closed()


async def test_pings_are_answered_with_what_they_carry(server: Served) -> None:
    async with connected(server.port) as wire:
        wire.send(frame(Kind.PING, 0, b"\0\1\2\3\xfc\xfd\xfe\xff"))
        answer = await wire.first(Kind.PING)
        assert (answer.flags, answer.payload) == (1, b"\0\1\2\3\xfc\xfd\xfe\xff")
