"""Requests that don't come, or come slowly, or grow when they are unpacked."""

from __future__ import annotations

import asyncio
import gzip

from tests.benchmarks.hostile import wire
from tests.benchmarks.hostile.attacker import Attack
from tests.benchmarks.hostile.attacks import methods

_REFUSED_PAUSE_S = 0.5
_BIG = int(3.9 * (1 << 20))


async def but_a_byte(attack: Attack, *, path: str, streams: int, connections: int = 8) -> None:
    """Messages of 3.9 MiB of which the last byte never comes."""
    block = wire.headers(path, attack.order.key)
    body = wire.message(b"\0" * _BIG)[:-1]

    async def hold(_: int) -> None:
        connection = await attack.connect()

        async def upload() -> None:
            while True:
                stream = connection.next_stream(awaited=True)
                await connection.send(wire.opening(stream, block))
                await connection.upload(stream, body)
                await connection.end(stream)
                if attack.order.alone:
                    await asyncio.sleep(attack.order.seconds)
                await asyncio.sleep(_REFUSED_PAUSE_S)
                if connection.closed:
                    return

        await asyncio.gather(*(upload() for _ in range(streams // connections)))

    await attack.times(connections, hold)


async def byte_by_byte(attack: Attack, *, streams: int, every_s: float) -> None:
    """Messages of which a byte comes now and then."""
    block = wire.headers(methods.CHAT, attack.order.key)
    body = wire.message(b"\0" * 65_536)

    async def hold(_: int) -> None:
        connection = await attack.connect()

        async def upload() -> None:
            while not connection.closed:
                stream = connection.next_stream(awaited=True)
                await connection.send(wire.opening(stream, block))
                for byte in body:
                    if connection.ended(stream):
                        break
                    await connection.send(wire.frame(wire.DATA, 0, stream, bytes([byte])))
                    await asyncio.sleep(every_s)
                await asyncio.sleep(_REFUSED_PAUSE_S)

        await asyncio.gather(*(upload() for _ in range(streams // 4)))

    await attack.times(4, hold)


async def silent(attack: Attack, *, path: str, streams: int, connections: int) -> None:
    """Streams on which nothing is sent after the headers; each that ends is begun again."""
    block = wire.headers(path, attack.order.key)

    async def hold(_: int) -> None:
        connection = await attack.connect()

        async def begin() -> None:
            while not connection.closed:
                stream = connection.next_stream(awaited=True)
                await connection.send(wire.opening(stream, block))
                await connection.end(stream)
                await asyncio.sleep(attack.order.seconds if attack.order.alone else 1.0)

        await asyncio.gather(*(begin() for _ in range(streams // connections)))

    await attack.times(connections, hold)


async def silent_ends(attack: Attack, *, path: str, within_s: float) -> None:
    """A caller that says nothing at all: the server has to end its stream."""
    connection = await attack.connect()
    stream = connection.next_stream(awaited=True)
    await connection.send(wire.opening(stream, wire.headers(path, attack.order.key)))
    try:
        async with asyncio.timeout(within_s):
            await connection.end(stream)
    except TimeoutError:
        attack.broken.append(f"a stream without a message is still open after {within_s:g} s")


async def gzip_bombs(attack: Attack, *, expanded_mb: int) -> None:
    """Messages of a few kilobytes that unpack to very many."""
    packed = gzip.compress(b"\0" * (expanded_mb << 20))
    block = wire.headers(methods.CHAT, attack.order.key, [(b"grpc-encoding", b"gzip")])
    body = wire.message(packed, compressed=True)

    async def send(_: int) -> None:
        connection = await attack.connect()
        while True:
            stream = connection.next_stream(awaited=True)
            await connection.send(wire.opening(stream, block))
            await connection.upload(stream, body, end=True)
            await connection.end(stream)

    await attack.times(8, send)
