"""How connections end: drained, old, with dead peers, with those that do too much or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from millstream_server.runtime.errors import Code, UnauthenticatedError
from millstream_server.runtime.rpc.call import after_first_message
from millstream_server.runtime.rpc.served_call import OpenCalls
from millstream_server.runtime.rpc.serving import Rpcs
from millstream_server.runtime.security.tls import ServerTls, TlsFiles
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.transport import connection as ending
from millstream_server.runtime.transport import server as transport
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.server import H2Server
from millstream_testing.waiting import until
from tests.support.wire.certificates import Authority, SecretMount
from tests.support.wire.listening import trusting
from tests.support.wire.raw_http2 import (
    END_HEADERS,
    ErrorCode,
    Kind,
    Rpc,
    Wire,
    connected,
    data,
    frame,
    message,
    ping,
    request_fields,
    reset,
)
from tests.support.wire.rpc_kinds import SERVICE, Kinds

CHAT, UNARY = f"/{SERVICE}/Chat", f"/{SERVICE}/Unary"
_LAST_STREAM = (1 << 31) - 1


@pytest.fixture(autouse=True)
def _fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check times every 10 ms."""
    monkeypatch.setattr(transport, "_TICK_S", 0.01)


@contextlib.asynccontextmanager
async def _running(
    rpcs: Rpcs | None = None, kinds: Kinds | None = None, **options: Any
) -> AsyncIterator[tuple[H2Server, Wire]]:
    """Serve `Kinds`, and connect."""
    server = H2Server(rpcs or Rpcs(), TransportOptions(max_receive_bytes=1 << 20, **options))
    server.add_registered_method_handlers(SERVICE, (kinds or Kinds()).by_name())
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        async with connected(port) as wire:
            wire.port = port
            yield server, wire
    finally:
        await server.stop(None)


def _goaways(wire: Wire) -> list[tuple[int, str, bytes]]:
    """Return last stream, code and text of each GOAWAY."""
    return [
        (struct.unpack_from(">L", one.payload)[0], one.error_code.name, one.payload[8:])
        for one in wire.of(Kind.GOAWAY)
    ]


@pytest.mark.parametrize("on", ["tls", "unix"])
async def test_an_rpc_over_another_kind_of_socket(on: str, tmp_path: Path) -> None:
    mount = SecretMount(tmp_path / "server")
    mount.put(Authority().issue("localhost"))
    tls = ServerTls(TlsFiles(mount.cert, mount.key)) if on == "tls" else None
    server = H2Server(Rpcs(), TransportOptions(max_receive_bytes=1 << 20))
    server.add_registered_method_handlers(SERVICE, Kinds().by_name())
    address = f"unix:{tmp_path}/socket" if on == "unix" else "127.0.0.1:0"
    target: int | str = server.bind(address, tls) or f"{tmp_path}/socket"
    await server.start()
    try:
        async with connected(target, tls=trusting(mount, "h2") if tls else None) as wire:
            rpc = wire.rpc(CHAT)
            for size in (0, 16_000, 5, 16_000):
                rpc.send(bytes(size))
                assert await rpc.next() == bytes(size)
    finally:
        await server.stop(None)


async def test_a_drain_loses_no_rpc_that_is_under_way() -> None:
    async with _running() as (server, wire):
        wire.answers = False
        rpc = wire.rpc(CHAT)
        rpc.send(b"one")
        assert await rpc.next() == b"one"
        stopping = asyncio.ensure_future(server.stop(10))
        drain_ping = await wire.first(Kind.PING)
        assert _goaways(wire) == [(_LAST_STREAM, "NO_ERROR", b"")]
        crossed = wire.rpc(UNARY)  # sent before the client knows
        crossed.send(b"", end=True)
        assert await crossed.code() == Code.OK
        wire.send(ping(drain_ping.payload, ack=True))
        await wire.until(lambda: len(wire.of(Kind.GOAWAY)) == 2)
        assert _goaways(wire)[1] == (crossed.stream, "NO_ERROR", b"")
        late = wire.rpc(UNARY)
        assert await late.end() == {"reset": "REFUSED_STREAM"}
        rpc.send(b"two", end=True)
        assert await rpc.next() == b"two"
        assert await rpc.code() == Code.OK
        await wire.until_closed()
        await stopping


async def test_a_drain_serves_what_comes_after_the_last_open_rpc_has_ended() -> None:
    async with _running() as (server, wire):
        wire.answers = False
        rpc = wire.rpc(CHAT)
        rpc.send(b"one")
        await rpc.next()
        stopping = asyncio.ensure_future(server.stop(10))
        drain_ping = await wire.first(Kind.PING)
        rpc.send(b"two", end=True)
        assert await rpc.code() == Code.OK
        await wire.answered()
        crossed = wire.rpc(UNARY)  # sent before the client knows
        crossed.send(b"", end=True)
        assert await crossed.code() == Code.OK
        wire.send(ping(drain_ping.payload, ack=True))
        await wire.until_closed()
        await stopping


async def test_a_drain_ends_although_its_ping_is_never_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "_DRAIN_ACK_S", 0.05)
    async with _running(max_connection_age_s=0.05) as (_, wire):
        wire.answers = False
        await wire.until_closed()
        assert len(_goaways(wire)) == 2


async def test_a_drain_cuts_what_is_left_after_its_grace() -> None:
    async with _running() as (server, wire):
        rpc = wire.rpc(CHAT)
        rpc.send(b"one")
        await rpc.next()
        await server.stop(0.05)
        await wire.until_closed()
        assert not rpc.over


async def test_an_old_connection_is_asked_to_end() -> None:
    options = {"max_connection_age_s": 0.05, "max_connection_age_grace_s": 0.1}
    async with _running(None, None, **options) as (_, wire):
        rpc = wire.rpc(CHAT)
        rpc.send(b"one")
        await wire.until(lambda: len(wire.of(Kind.GOAWAY)) == 2)
        assert _goaways(wire)[1] == (rpc.stream, "NO_ERROR", b"")
        ended = await rpc.end()  # it doesn't end by itself
        assert ended["grpc-status"] == str(int(Code.UNAVAILABLE))
        assert "--max-connection-age-s" in unquote(ended["grpc-message"])
        await wire.until_closed()
        assert rpc.messages == [b"one"]


async def test_a_silent_peer_is_pinged_and_cut() -> None:
    async with _running(keepalive_s=0.05, keepalive_timeout_s=0.05) as (_, wire):
        await wire.until(lambda: len(wire.of(Kind.PING)) == 3)  # it is answered twice
        wire.answers = False
        await wire.until_closed()
        assert wire.of(Kind.GOAWAY) == []


async def test_a_peer_that_sends_is_not_dead_while_its_ack_is_behind_other_bytes() -> None:
    async with _running(keepalive_s=0.05, keepalive_timeout_s=2.0) as (_, wire):
        wire.answers = False
        rpc = wire.rpc(CHAT)
        for had in range(0, 100, 10):
            await wire.until(lambda had=had: len(wire.of(Kind.PING)) > had // 50)  # type: ignore[misc]
            rpc.send(b"hi")
            await rpc.next()
        assert not wire.closed


async def test_too_many_pings_end_a_connection() -> None:
    async with _running() as (_, wire):
        for _ in range(4):
            wire.send(ping())
        await wire.until_closed()
        assert len(wire.of(Kind.PING)) >= 3
        assert _goaways(wire) == [(0, "ENHANCE_YOUR_CALM", b"too_many_pings")]


async def test_pings_between_responses_are_fine() -> None:
    async with _running() as (_, wire):
        rpc = wire.rpc(CHAT)
        for _ in range(10):
            rpc.send(b"hi")
            assert await rpc.next() == b"hi"
            await wire.answered()


async def test_too_many_resets_end_a_connection() -> None:
    async with _running(max_resets=10, resets_per_s=0.001) as (_, wire):
        for _ in range(11):
            rpc = wire.rpc(CHAT)
            rpc.send(b"hi")
            await wire.until(lambda rpc=rpc: rpc.messages or wire.closed)  # type: ignore[misc]
            rpc.reset()
        await wire.until_closed()
        (ended,) = _goaways(wire)
        assert ended[1] == ErrorCode.ENHANCE_YOUR_CALM.name
        assert b"reset" in ended[2]


async def test_resets_count_for_all_connections_of_a_caller() -> None:
    """Above the bound a connection takes no more; what other users of a proxy have open goes on."""

    async def reset_one(wire: Wire) -> None:
        rpc = wire.rpc(CHAT)
        rpc.send(b"hi")
        assert await rpc.next() == b"hi"
        rpc.reset()
        await wire.answered()

    async with _running(max_resets=10, resets_per_s=0.001) as (server, wire):
        async with connected(wire.port) as same, connected(wire.port, source="127.0.0.9") as other:
            kept = same.rpc(CHAT)
            kept.send(b"hi")
            assert await kept.next() == b"hi"
            for each in [wire] * 8 + [same] * 3:
                await reset_one(each)
            assert _goaways(same) == [(7, "ENHANCE_YOUR_CALM", b"too many requests were reset")]
            assert not _goaways(wire)
            kept.send(b"more")
            assert await kept.next() == b"more"
            late = same.rpc(CHAT).stream
            await same.until(lambda: bool(same.of(Kind.RST_STREAM, stream=late)))
            assert same.of(Kind.RST_STREAM, stream=late)[0].error_code is ErrorCode.REFUSED_STREAM
            for _ in range(10):
                await reset_one(other)
            assert not _goaways(other)
            kept.send_raw(b"", end=True)
            await same.until_closed()
        await until(lambda: len(server.connections) == 1)


async def test_requests_before_the_end_of_a_connection_are_not_begun() -> None:
    """They wait while others are served; what has left by then needs no answer."""
    kinds = Kinds()
    async with _running(kinds=kinds) as (server, wire):
        await wire.answered()
        streams = range(1, 801, 2)
        requests = (
            wire.headers(stream, request_fields(UNARY)) + data(stream, message(b"hang"), end=True)
            for stream in streams
        )
        wire.send(b"".join(requests))
        wire.send_eof()
        await until(lambda: not server.connections)
        await until(lambda: kinds.cancelled == kinds.entered)
        assert 0 < kinds.entered < len(streams) / 2, "those of one turn of the loop"


async def test_of_many_rpcs_that_are_lost_at_once_few_end_in_a_turn_of_the_loop() -> None:
    kinds, ended = Kinds(), list[int]()
    async with _running(kinds=kinds) as (_, wire):
        for _ in range(200):
            wire.rpc(UNARY).send(b"hang", end=True)
        await until(lambda: kinds.entered == 200)

        def look() -> None:
            ended.append(kinds.cancelled)
            if kinds.cancelled < 200:
                asyncio.get_running_loop().call_soon(look)

        look()
        wire.send_eof()
        await until(lambda: kinds.cancelled == 200)
        assert max(after - before for before, after in itertools.pairwise(ended)) <= 16


@pytest.mark.parametrize("how", ["trailers", "data"])
async def test_streams_that_the_server_has_to_reset_count_as_resets(how: str) -> None:
    async with _running(max_resets=10, resets_per_s=0.001) as (_, wire):
        for stream in range(1, 100, 2):
            if how == "trailers":
                broken = wire.headers(stream, [("Bad", "")], end=True)
            else:
                broken = data(stream, message(b"hang"), end=True) + data(stream, b"x")
            fields = request_fields(CHAT if how == "trailers" else UNARY)
            wire.send(wire.headers(stream, fields) + broken)
        await wire.until_closed()
        resets = [f for f in wire.frames if f.kind == Kind.RST_STREAM]
        assert len(resets) <= 11
        assert _goaways(wire)[0][1:] == ("ENHANCE_YOUR_CALM", b"too many requests were reset")


async def test_what_comes_for_a_stream_that_ended_early_is_no_fault() -> None:
    """A caller that uploads sees the status later."""
    async with _running(max_resets=0, resets_per_s=0.001) as (_, wire):
        rpc = wire.rpc(UNARY)
        rpc.send_raw(message(b"", length=1 << 30))
        assert await rpc.code() == Code.RESOURCE_EXHAUSTED
        start = len(wire.frames)
        for _ in range(50):
            rpc.send_raw(b"more")
        await wire.answered()
        assert {f.kind for f in wire.frames[start:]} == {Kind.PING}


@pytest.mark.parametrize(
    "begun",
    [
        frame(Kind.HEADERS, 1, b"\x83"),
        frame(Kind.HEADERS, 1, b"\x83") + frame(Kind.CONTINUATION, 1, b"\x86"),
        frame(Kind.HEADERS, 1, b"\x83", END_HEADERS, length=100),
    ],
)
async def test_headers_that_begin_must_come_whole_in_time(begun: bytes) -> None:
    async with _running(headers_s=0.05) as (_, wire):
        await wire.first(Kind.SETTINGS)
        await wire.answered()
        wire.send(begun)
        await wire.until_closed()
        assert _goaways(wire)[0][1:] == (
            "ENHANCE_YOUR_CALM",
            b"a header block that doesn't come whole",
        )


async def test_headers_that_wait_for_their_turn_here_are_not_late() -> None:
    async with _running(headers_s=0.05) as (server, wire):
        await wire.first(Kind.SETTINGS)
        await wire.answered()
        connection: Any = next(iter(server.connections))
        connection._intake._paused = True  # as when it has used up its share
        wire.send(wire.headers(1, request_fields(UNARY)) + data(1, message(b""), end=True))
        await until(lambda: bool(connection._intake._unread))
        connection.h2.reader.feed(frame(Kind.HEADERS, 1, b"")[:5])
        late_s = connection.loop.time() + 60
        assert connection.block.age_s(late_s, waits=connection._intake.waits) == 0
        connection._intake._paused = False
        assert connection.block.age_s(late_s + 60, waits=connection._intake.waits) == 60
        wire.abort()


async def test_headers_in_time_are_not_cut() -> None:
    async with _running(headers_s=0.2) as (_, wire):
        await wire.first(Kind.SETTINGS)
        await wire.answered()
        for stream in range(1, 40, 2):
            whole = wire.headers(stream, request_fields(UNARY))
            wire.send(whole[:-1])
            await asyncio.sleep(0.02)
            wire.send(whole[-1:] + data(stream, message(b""), end=True))
            assert (await Rpc(wire, stream).end()).get("grpc-status") == "0", str(wire)


async def test_headers_that_are_not_whole_are_bounded_in_sum() -> None:
    """Who holds most of them loses them; they need no key."""
    async with _running(max_received_bytes=256 << 10) as (server, wire):
        big = frame(Kind.HEADERS, 1) + frame(Kind.CONTINUATION, 1, bytes(1 << 14)) * 12
        port = wire.port
        async with connected(port) as first, connected(port) as second:
            for other in (first, second):
                await other.first(Kind.SETTINGS)
                await other.answered()
            first.send(big)
            await until(lambda: server.bounds.received.used > 100_000)
            second.send(big)
            await first.until(lambda: first.closed or second.closed)
            ended = first if first.closed else second
            assert b"haven't come whole" in _goaways(ended)[0][2]
        await until(lambda: not server.bounds.received.used)
        rpc = wire.rpc(UNARY)
        rpc.send(b"", end=True)
        assert await rpc.code() == Code.OK


async def test_ticks_of_many_connections_are_many_turns_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "_AT_ONCE", 2)
    async with _running() as (server, wire), contextlib.AsyncExitStack() as others:
        for _ in range(6):
            await (await others.enter_async_context(connected(wire.port))).first(Kind.SETTINGS)
        ticked: list[list[object]] = []

        def count(connection: Any, _now_s: float) -> None:
            if not ticked[-1:] or connection in {c for turn in ticked for c in turn}:
                ticked.clear()
            turn = asyncio.get_running_loop().time()
            ticked.append([connection, turn])

        monkeypatch.setattr(type(next(iter(server.connections))), "tick", count)
        await until(lambda: len(ticked) == len(server.connections))
        turns = [turn for _, turn in ticked]
        assert max(turns.count(turn) for turn in turns) <= 2


async def test_a_stream_without_a_message_ends_in_time() -> None:
    async with _running(first_message_s=0.05) as (_, wire):
        wire.rpc(UNARY)  # a single request has longer
        heard = wire.rpc(CHAT)
        heard.send(b"hi")
        silent, half = wire.rpc(CHAT), wire.rpc(CHAT)
        half.send_raw(b"\0\0\0")
        for rpc in (silent, half):
            ended = await rpc.end()
            assert ended["grpc-status"] == str(int(Code.INVALID_ARGUMENT)), ended
            assert "0.05 s" in unquote(ended["grpc-message"])
        heard.send(b"still")
        assert [await heard.next(), await heard.next()] == [b"hi", b"still"]


async def test_an_rpc_that_fails_before_its_handlers_first_step_has_a_status() -> None:
    async with _running() as (server, wire):
        await wire.first(Kind.SETTINGS)
        connection: Any = next(iter(server.connections))
        connection.data_received(wire.headers(1, request_fields(UNARY)))
        connection.data_received(data(1, message(b"", length=1 << 30)))
        ended = await Rpc(wire, 1).end()
        assert ended["grpc-status"] == str(int(Code.RESOURCE_EXHAUSTED)), ended


async def test_silent_rpcs_above_their_number_end_the_oldest_first() -> None:
    async with _running(first_message_s=60.0, max_silent_streams=20) as (_, wire):
        heard = wire.rpc(CHAT)
        heard.send(b"hi")
        assert await heard.next() == b"hi"
        silent = [wire.rpc(CHAT) for _ in range(21)]
        ended = await silent[0].end()
        assert ended["grpc-status"] == str(int(Code.RESOURCE_EXHAUSTED)), ended
        assert "without a message" in unquote(ended["grpc-message"])
        silent[-1].send(b"late")
        assert await silent[-1].next() == b"late"
        heard.send(b"still")
        assert await heard.next() == b"still"


class _Waits(Kinds):
    """`Chat` has nothing to do before the first message."""

    @after_first_message
    async def chat(self, requests: Any, call: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request


async def test_a_method_may_wait_for_the_first_message_without_a_task() -> None:
    open_calls = OpenCalls()
    async with _running(Rpcs(open_calls=open_calls), _Waits(), first_message_s=60.0) as (_, wire):
        await wire.first(Kind.SETTINGS)
        tasks = len(asyncio.all_tasks())
        silent = [wire.rpc(CHAT) for _ in range(5)]
        await wire.answered()
        assert (open_calls.count, len(asyncio.all_tasks())) == (5, tasks)
        silent[0].send(b"hi")
        assert await silent[0].next() == b"hi"
        silent[1].send(b"", end=True)
        assert await silent[1].code() == Code.OK
        wire.send(reset(silent[2].stream))
        await wire.answered()
        assert open_calls.count == 3
        late = wire.rpc(CHAT, [(b"grpc-timeout", b"1m")])
        assert await late.code() == Code.DEADLINE_EXCEEDED
        open_calls.cut()
        assert await silent[3].code() == Code.UNAVAILABLE
        assert await silent[4].code() == Code.UNAVAILABLE
        assert await silent[0].code() == Code.UNAVAILABLE
        await wire.until(lambda: not open_calls.count)


class _Refuses:
    """A layer that lets nobody in."""

    def covers(self, method: str) -> bool:
        return True

    def enter(self, call: Any) -> None:
        raise UnauthenticatedError("no")


async def test_an_rpc_that_is_reset_before_its_handlers_first_step_leaves_nothing() -> None:
    open_calls = OpenCalls()
    async with _running(Rpcs(open_calls=open_calls), _Waits()) as (server, wire):
        await wire.first(Kind.SETTINGS)
        connection: Any = next(iter(server.connections))
        for stream, path in ((1, CHAT), (3, UNARY)):
            connection.data_received(wire.headers(stream, request_fields(path)))
            connection.data_received(data(stream, message(b"hi")))
            assert open_calls.count == 1
            connection.data_received(reset(stream))
            await until(lambda: not open_calls.count)


async def test_layers_do_not_wait_for_the_first_message() -> None:
    open_calls = OpenCalls()
    async with _running(Rpcs([_Refuses()], open_calls=open_calls), _Waits()) as (_, wire):
        assert await wire.rpc(CHAT).code() == Code.UNAUTHENTICATED
        assert open_calls.count == 0


async def test_bytes_of_connections_whose_rpcs_stay_silent_go_last() -> None:
    async with _running(first_message_s=60.0, min_ping_interval_s=0.0) as (server, wire):
        await wire.first(Kind.SETTINGS)
        connection: Any = next(iter(server.connections))
        assert connection._goes_last(), "it has not said anything"
        rpc = wire.rpc(CHAT)
        rpc.send(b"hi")
        await rpc.next()
        assert not connection._goes_last()
        silent = [wire.rpc(CHAT) for _ in range(2)]
        await wire.answered()
        assert connection._goes_last()
        for one in silent:
            one.send(b"late")
            await one.next()
        assert not connection._goes_last()


async def test_what_clients_hold_is_shown() -> None:
    def shown() -> tuple[float, float]:
        gauges = (metrics.TRANSPORT_STREAMS, metrics.TRANSPORT_RECEIVED_BYTES)
        return tuple(next(iter(gauge.collect())).samples[0].value for gauge in gauges)  # type: ignore[return-value]

    async with _running() as (_, wire):
        rpc = wire.rpc(CHAT)
        rpc.send_raw(b"\0" + (50_000).to_bytes(4, "big") + bytes(10_000))
        rpc.send_raw(bytes(10_000))
        await wire.answered()
        assert shown() == (1, 20_000)
        rpc.reset()
        await wire.answered()
        assert shown() == (0, 0)
