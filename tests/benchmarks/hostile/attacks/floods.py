"""Floods of frames that cost their sender nearly nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from tests.benchmarks.hostile import wire
from tests.benchmarks.hostile.attacker import Attack
from tests.benchmarks.hostile.attacks import methods
from tests.benchmarks.hostile.wire import Connection

_BATCH = 1_000
_CONNECTIONS = 4
_AGAIN_S = 0.2
_LATER = 2 * 20
"""Ids of twenty streams."""


async def _repeat(attack: Attack, data: bytes, *, reads: bool = True) -> None:
    async def flood(_: int) -> None:
        connection = await attack.connect()
        if not reads:
            connection.stop_reading()
        while True:
            await connection.send(data)

    await attack.times(_CONNECTIONS, flood)


async def ping(attack: Attack, *, reads: bool = True) -> None:
    """PING without end; ``reads``: the answers are read."""
    await _repeat(attack, wire.frame(wire.PING, payload=b"hostile!") * _BATCH, reads=reads)


async def settings(attack: Attack, *, reads: bool = True) -> None:
    """SETTINGS without end, with a table size that changes."""
    pair = wire.settings({1: 4096}) + wire.settings({1: 0})
    await _repeat(attack, pair * (_BATCH // 2), reads=reads)


async def window_update(attack: Attack) -> None:
    """WINDOW_UPDATE of one byte for the connection."""
    await _repeat(attack, wire.window_update(0, 1) * _BATCH)


async def priority(attack: Attack) -> None:
    """PRIORITY frames for streams that nobody opens."""
    frames = (
        wire.frame(wire.PRIORITY, stream=2 * i + 1, payload=b"\0\0\0\0\x10") for i in range(_BATCH)
    )
    await _repeat(attack, b"".join(frames))


async def unknown_frames(attack: Attack) -> None:
    """Frames of a kind that HTTP/2 doesn't know, which a server has to ignore."""
    await _repeat(attack, wire.frame(0xBE, payload=b"x" * 64) * _BATCH)


async def continuation(attack: Attack) -> None:
    """A header block that never ends."""
    piece = wire.literal(b"x", b"y" * 100)
    more = wire.frame(wire.CONTINUATION, stream=1, payload=piece) * 100

    async def flood(_: int) -> None:
        connection = await attack.connect()
        block = wire.headers(methods.CHAT, attack.order.key)
        await connection.send(wire.frame(wire.HEADERS, 0, connection.next_stream(), block))
        while True:
            await connection.send(more)

    await attack.times(_CONNECTIONS, flood)


async def empty_data(attack: Attack) -> None:
    """DATA frames of no bytes on a stream that waits for a message."""
    block = wire.headers(methods.CHAT, attack.order.key)

    async def flood(_: int) -> None:
        connection = await attack.connect()
        while True:
            stream = connection.next_stream(awaited=True)
            await connection.send(wire.opening(stream, block))
            data = wire.frame(wire.DATA, stream=stream) * _BATCH
            while not connection.ended(stream):
                await connection.send(data)

    await attack.times(_CONNECTIONS, flood)


async def start_and_reset(attack: Attack, *, per_s: float, path: str = methods.CHAT) -> None:
    """Streams that are begun and at once reset."""
    block = wire.headers(path, attack.order.key)
    batch = 25

    async def flood(_: int) -> None:
        connection = await attack.connect()
        while True:
            if per_s:
                await attack.rate(per_s / batch)
            streams = [connection.next_stream() for _ in range(batch)]
            await connection.send(
                b"".join(wire.opening(stream, block) + wire.reset(stream) for stream in streams)
            )

    await attack.times(2, flood)


async def made_to_reset(attack: Attack, *, per_s: float) -> None:
    """Streams that the server has to reset, since their windows are raised by 0."""
    block = wire.headers(methods.CHAT, attack.order.key)
    body = wire.message(methods.chat(2_000))
    batch = 10

    async def flood(_: int) -> None:
        connection = await attack.connect()
        while True:
            await attack.rate(per_s / batch)
            await connection.send(b"".join(_to_be_reset(connection, block, body, batch)))

    await attack.times(2, flood)


def _to_be_reset(
    connection: Connection, block: bytes, body: bytes, count: int
) -> itertools.chain[bytes]:
    return itertools.chain.from_iterable(
        (
            wire.opening(stream, block),
            wire.frame(wire.DATA, wire.END_STREAM, stream, body),
            wire.window_update(stream, 0),
        )
        for stream in (connection.next_stream() for _ in range(count))
    )


async def watches_and_settings(attack: Attack, *, connections: int, watches: int) -> None:
    """SETTINGS that change the window of thousands of open streams, each in 21 bytes."""
    block = wire.headers(methods.WATCH, attack.order.key)
    body = wire.message(methods.CHECK_REQUEST)
    pair = wire.settings({4: 70_000}) + wire.settings({4: 65_535})

    async def flood(_: int) -> None:
        connection = await attack.connect()
        for _ in range(watches):
            stream = connection.next_stream()
            data = wire.frame(wire.DATA, wire.END_STREAM, stream, body)
            await connection.send(wire.opening(stream, block) + data)
        while True:
            await connection.send(pair * _BATCH)

    await attack.times(connections, flood)


async def unknown_settings(
    attack: Attack, *, connections: int, frames: int, ids: int, bytes_per_s: int = 0
) -> None:
    """SETTINGS of ids that nobody knows, each frame others; the connections stay open."""

    def pieces() -> list[bytes]:
        numbers = itertools.cycle(range(0x100, 0xFFFF))
        return [wire.settings({next(numbers): 1 for _ in range(ids)}) for _ in range(frames)]

    sent = pieces()

    async def hold(_: int) -> None:
        connection = await attack.connect()
        for piece in sent:
            if bytes_per_s:
                await attack.rate(bytes_per_s / len(piece))
            await connection.send(piece)
        await asyncio.sleep(0 if connection.closed else attack.order.seconds)
        await asyncio.sleep(_AGAIN_S)

    await attack.times(connections, hold)


async def bad_trailers(attack: Attack, *, per_s: float) -> None:
    """Streams that the server has to reset, since their trailers are none; no key is needed."""
    block = wire.headers(methods.CHAT, attack.order.key)
    await _broken_streams(
        attack, per_s, lambda s: wire.opening(s, block) + wire.opening(s, b"\x83", end=True)
    )


async def data_after_end(attack: Attack, *, per_s: float) -> None:
    """Turns that are begun, on streams that the server then has to reset."""
    block = wire.headers(methods.CHAT, attack.order.key)
    body = wire.message(methods.chat(2_000))
    await _broken_streams(
        attack,
        per_s,
        lambda s: (
            wire.opening(s, block)
            + wire.frame(wire.DATA, wire.END_STREAM, s, body)
            + wire.frame(wire.DATA, 0, s, b"x")
        ),
    )


async def _broken_streams(attack: Attack, per_s: float, made: Callable[[int], bytes]) -> None:
    batch = 10

    async def flood(_: int) -> None:
        connection = await attack.connect()
        while True:
            await attack.rate(per_s / batch)
            await connection.send(b"".join(made(connection.next_stream()) for _ in range(batch)))

    await attack.times(2, flood)


async def turns_and_resets(attack: Attack, *, connections: int, per_s: float) -> None:
    """Whole chats that are reset when they have begun, on connections that keep to their resets."""
    block = wire.headers(methods.CHAT, attack.order.key)
    body = wire.message(methods.chat(2_000))

    async def flood(_: int) -> None:
        connection = await attack.connect()
        while True:
            await attack.rate(per_s)
            stream = connection.next_stream()
            await connection.send(
                wire.opening(stream, block) + wire.frame(wire.DATA, wire.END_STREAM, stream, body)
            )
            await asyncio.sleep(0.01)
            await connection.send(wire.reset(stream))

    await attack.times(connections, flood)


async def zero_window_chats(
    attack: Attack, *, connections: int, per_s: float, tokens: int = 1_000
) -> None:
    """Chats whose answers have no window, begun until the time is up; then all is closed."""
    await _chats(attack, connections, per_s, tokens, window=0)


async def many_chats(
    attack: Attack, *, connections: int, per_s: float, tokens: int = 1_000, overflow: bool = False
) -> None:
    """Chats that are begun and read.

    ``overflow``: the server has to reset each, twenty chats later, since its window overflows.
    """
    await _chats(attack, connections, per_s, tokens, window=wire.DEFAULT_WINDOW, overflow=overflow)


async def _chats(
    attack: Attack,
    connections: int,
    per_s: float,
    tokens: int,
    *,
    window: int,
    overflow: bool = False,
) -> None:
    block = wire.headers(methods.CHAT, attack.order.key)
    body = wire.message(methods.chat(tokens))

    async def flood(_: int) -> None:
        connection = await attack.connect(window=window)
        while True:
            await attack.rate(per_s)
            stream = connection.next_stream()
            data = wire.frame(wire.DATA, wire.END_STREAM, stream, body)
            if overflow and stream > _LATER:
                data += wire.window_update(stream - _LATER, wire.MAX_WINDOW)
            await connection.send(wire.opening(stream, block) + data)

    await attack.times(connections, flood)
