"""Callers that read slowly, or not at all: normal ones lose nothing, others only what is needed."""

from __future__ import annotations

from millstream_server.runtime.errors import Code
from tests.support.wire.interop_service import SERVICE, Interop, ask
from tests.support.wire.raw_http2 import Kind, Setting, connected, ping, settings, window_update
from tests.support.wire.transports import serving

UNARY = f"/{SERVICE}/Unary"
_WIDE: dict[int, int] = {
    Setting.INITIAL_WINDOW_SIZE: (1 << 31) - 1,
    Setting.MAX_FRAME_SIZE: (1 << 24) - 1,
}
_ALL = window_update(0, (1 << 31) - (1 << 16))
_SERVICES = {SERVICE: Interop().handlers()}


async def test_a_caller_with_wide_windows_and_long_frames_may_read_slowly() -> None:
    async with serving(_SERVICES) as server, connected(server.port) as wire:
        wire.send(settings(_WIDE), _ALL)
        await wire.answered()
        rpc = wire.rpc(UNARY)
        rpc.send(ask(8 << 20), end=True)
        await rpc.headers()
        wire.pause()
        quick = wire.rpc(UNARY)
        quick.send(ask(10), end=True)
        await wire.drained()
        wire.resume()
        assert await rpc.code() == await quick.code() == Code.OK
        assert len(rpc.messages[0]) == 8 << 20


async def test_pings_while_a_long_message_is_read_are_fine() -> None:
    async with (
        serving(_SERVICES, min_ping_interval_s=300.0) as server,
        connected(server.port) as wire,
    ):
        wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 1 << 14}))
        await wire.answered()
        rpc = wire.rpc(UNARY)
        rpc.send(ask(6 << 14), end=True)
        for had in range(0, 6 << 14, 1 << 14):  # as clients do that measure the bandwidth
            await wire.until(lambda had=had: len(rpc.received) > had)  # type: ignore[misc]
            wire.send(ping(), window_update(0, 1 << 14), window_update(rpc.stream, 1 << 14))
        assert await rpc.code() == Code.OK
        assert wire.of(Kind.GOAWAY) == []


async def test_only_as_many_responses_are_dropped_as_the_bound_needs() -> None:
    async with (
        serving(_SERVICES, max_unsent_bytes=350_000) as server,
        connected(server.port) as wire,
    ):
        wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 0}))
        await wire.answered()
        rpcs = [wire.rpc(UNARY) for _ in range(4)]
        for rpc in rpcs:
            rpc.send(ask(100_000), end=True)
        await wire.until(lambda: any(rpc.over for rpc in rpcs))
        await wire.answered()
        ended = [rpc for rpc in rpcs if rpc.over]
        assert [await rpc.code() for rpc in ended] == [Code.RESOURCE_EXHAUSTED]
        wire.send(_ALL, settings(_WIDE))
        assert sorted([await rpc.code() for rpc in rpcs]) == [0, 0, 0, Code.RESOURCE_EXHAUSTED]
