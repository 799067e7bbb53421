"""Callers that ask for much and read little, or nothing."""

from __future__ import annotations

import asyncio

from tests.benchmarks.hostile import wire
from tests.benchmarks.hostile.attacker import Attack
from tests.benchmarks.hostile.attacks import methods
from tests.benchmarks.hostile.wire import Connection

_CONNECTIONS = 4
_AGAIN_S = 0.5


async def unread(attack: Attack, *, path: str, request: bytes, calls: int) -> None:
    """Answers for which no window is ever opened; a call that ends is made again."""
    block = wire.headers(path, attack.order.key)

    async def hold(_: int) -> None:
        connection = await attack.connect(window=0)

        async def call() -> None:
            while not connection.closed:
                stream = connection.next_stream(awaited=True)
                await connection.send(wire.opening(stream, block))
                await connection.upload(stream, wire.message(request), end=True)
                await connection.end(stream)
                await asyncio.sleep(attack.order.seconds if attack.order.alone else _AGAIN_S)

        await asyncio.gather(*(call() for _ in range(calls // _CONNECTIONS)))

    await attack.times(_CONNECTIONS, hold)


async def completes(attack: Attack) -> None:
    """32 completions of 16 choices, 3,100 tokens and 20 logprobs each."""
    request = methods.complete(3_100, 16, 20)
    await unread(attack, path=methods.COMPLETE, request=request, calls=32)


async def chats(attack: Attack) -> None:
    """200 long chats."""
    await unread(attack, path=methods.CHAT, request=methods.chat(3_000), calls=200)


async def big_answers(attack: Attack) -> None:
    """400 answers of more than a megabyte."""
    request = methods.tokenize("~!" * (300 << 10))
    await unread(attack, path=methods.TOKENIZE, request=request, calls=400)


async def byte_a_second(attack: Attack) -> None:
    """100 chats of which each reads a byte a second."""
    block = wire.headers(methods.CHAT, attack.order.key)
    body = wire.message(methods.chat(3_000))

    async def hold(_: int) -> None:
        connection = await attack.connect(window=0)

        async def call() -> None:
            while not connection.closed:
                stream = connection.next_stream(awaited=True)
                await connection.send(wire.opening(stream, block))
                await connection.upload(stream, body, end=True)
                while not connection.ended(stream):
                    await connection.send(wire.window_update(stream, 1))
                    await asyncio.sleep(1.0)
                await asyncio.sleep(_AGAIN_S)

        await asyncio.gather(*(call() for _ in range(100 // _CONNECTIONS)))

    await attack.times(_CONNECTIONS, hold)


async def reflection_echoes(attack: Attack, *, size: int) -> None:
    """Reflection repeats what it is asked; nobody reads that."""
    block = wire.headers(methods.REFLECTION, attack.order.key)
    body = wire.message(methods.reflect_file("x" * size))

    async def hold(_: int) -> None:
        connection = await attack.connect(window=0)

        async def ask() -> None:
            while not connection.closed:
                stream = connection.next_stream(awaited=True)
                await connection.send(wire.opening(stream, block))
                while not connection.ended(stream):
                    await connection.upload(stream, body)
                await asyncio.sleep(_AGAIN_S)

        await asyncio.gather(*(ask() for _ in range(16)))

    await attack.times(_CONNECTIONS, hold)


async def slow_but_sound(attack: Attack, *, tokens: int) -> None:
    """A control: four callers that read 2 KiB a second have to get their answers whole."""
    answered = [0] * _CONNECTIONS

    async def read(number: int) -> None:
        connection = await attack.connect(window=512)
        stream = connection.next_stream(awaited=True)
        block = wire.headers(methods.CHAT, attack.order.key)
        await connection.send(wire.opening(stream, block))
        # Windows are opened here, not by what has been received.
        connection.tops_up = False
        await connection.upload(stream, wire.message(methods.chat(tokens)), end=True)
        await _sip(connection, stream)
        how = await connection.end(stream)
        answered[number] += how in ("status 0", "alone")
        if how not in ("status 0", "alone"):
            attack.broken.append(f"a slow reader's chat ended with {how}")

    try:
        await attack.times(_CONNECTIONS, read)
    finally:
        if not all(answered):
            attack.broken.append(f"{answered.count(0)} slow readers got no whole answer in time")


async def _sip(connection: Connection, stream: int) -> None:
    while not connection.ended(stream) and not connection.closed:
        await connection.send(wire.window_update(stream, 200))
        await asyncio.sleep(0.1)
