"""Requests of HTTP/1.1: slow, ambiguous, too many at once, or with answers that nobody reads."""

from __future__ import annotations

import asyncio
import itertools
import json

from tests.benchmarks.hostile import http1
from tests.benchmarks.hostile.attacker import Attack
from tests.benchmarks.hostile.http1 import Http1, opened, request

_AGAIN_S = 0.5
_BODY_BYTES = int(3.9 * (1 << 20))
_RECEIVES_BYTES = 4096
"""Of a reader that doesn't read: what the server sends soon waits there."""


async def slow_heads(attack: Attack, *, count: int, within_s: float) -> None:
    """Heads of which a byte comes now and then: the server has to end them."""

    async def hold(_: int) -> None:
        await attack.rate(1_000)
        async with opened(attack) as http:
            http.call()
            ends = asyncio.ensure_future(_is_closed(http, within_s))
            head = request(http1.CHAT, key=attack.order.key, more="X: " + "x" * 4_000 + "\r\n")
            for at in range(len(head) - 1):
                if ends.done():
                    break
                await http.send(head[at : at + 1])
                await asyncio.sleep(0.5)
            if not await ends and not attack.order.alone:
                attack.broken[:] = [f"a head that doesn't end is waited for above {within_s:g} s"]

    await attack.times(count, hold)


async def slow_bodies(attack: Attack, *, count: int, within_s: float) -> None:
    """Bodies of which a byte comes now and then: the server has to end them, too."""
    head = request(http1.CHAT, key=attack.order.key, length=_BODY_BYTES)

    async def hold(_: int) -> None:
        await attack.rate(1_000)
        async with opened(attack) as http:
            http.call()
            await http.send(head)
            ends = asyncio.ensure_future(_is_closed(http, within_s))
            while not ends.done():
                await http.send(b" ")
                await asyncio.sleep(0.5)
            if not await ends and not attack.order.alone:
                attack.broken[:] = [f"a body that doesn't end is waited for above {within_s:g} s"]

    await attack.times(count, hold)


async def _is_closed(http: Http1, within_s: float) -> bool:
    """Whether the server closes a connection in time; it may send a response before."""
    try:
        async with asyncio.timeout(within_s):
            while await http.read():
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


async def but_a_byte(attack: Attack, *, count: int) -> None:
    """Bodies of 3.9 MiB of which the last byte never comes."""
    body = b" " * (_BODY_BYTES - 1)
    data = request(http1.CHAT, body, key=attack.order.key, length=_BODY_BYTES)

    async def hold(_: int) -> None:
        async with opened(attack) as http:
            http.call()
            await http.send(data)
            await http.status()
        await asyncio.sleep(attack.order.seconds if attack.order.alone else _AGAIN_S)

    await attack.times(count, hold)


async def many_fields(attack: Attack, *, connections: int = 20) -> None:
    """Heads of 15 KB, in as many fields as go."""
    data = request(http1.MODELS, verb="GET", key=attack.order.key, more="a:b\r\n" * 3_000)

    async def send(_: int) -> None:
        async with opened(attack) as http:
            while True:
                http.call()
                await http.send(data)
                if await http.status() == "closed":
                    return

    await attack.times(connections, send)


async def pipelined(attack: Attack, *, connections: int, reads: bool = True) -> None:
    """Requests without a pause, the next before the response of the one before it."""
    one = request(http1.MODELS, verb="GET", key=attack.order.key)
    many = one * 200

    async def send(_: int) -> None:
        async with opened(attack) as http:
            taken = asyncio.ensure_future(_take_all(http)) if reads else None
            try:
                while True:
                    attack.tally.calls += 200
                    await http.send(many)
            finally:
                if taken is not None:
                    taken.cancel()

    await attack.times(connections, send)


async def _take_all(http: Http1) -> None:
    while await http.read(1 << 16):
        pass


async def half_closed(attack: Attack, *, per_s: float) -> None:
    """Chats whose callers close their side at once, and wait."""
    data = request(http1.CHAT, http1.chat(200), key=attack.order.key)

    async def ask(_: int) -> None:
        await attack.rate(per_s)
        async with opened(attack) as http:
            http.call()
            await http.send(data)
            http.writer.write_eof()
            while await http.read():
                pass
        attack.tally.answers["closed"] += 1

    await attack.times(100, ask)


_CHUNKED = "Transfer-Encoding: chunked\r\n"
_SMUGGLED = (
    ("Content-Length: 6\r\n" + _CHUNKED, "0\r\n\r\n"),
    (_CHUNKED + "Content-Length: 6\r\n", "0\r\n\r\n"),
    ("Content-Length: 6\r\nContent-Length: 0\r\n", ""),
    ("Content-Length: 0\r\nContent-Length: 0\r\n", ""),
    ("Content-Length: +0\r\n", ""),
    ("Content-Length: 0, 0\r\n", ""),
    ("Content-Length: -1\r\n", ""),
    ("Content-Length: 0x0\r\n", ""),
    ("Content-Length : 0\r\n", ""),
    (_CHUNKED, "x\r\n\r\n"),
    (_CHUNKED, "-1\r\n\r\n"),
    (_CHUNKED, "FFFFFFFFFFFFFFFFF\r\nabc"),
    (_CHUNKED, "1\r\nabc0\r\n\r\n"),
    (_CHUNKED, "0\n\n"),
    (_CHUNKED, "1 \r\na\r\n0\r\n\r\n"),
    ("Transfer-Encoding: chunked, identity\r\n", "0\r\n\r\n"),
    ("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"),
    ("Transfer-Encoding: identity, chunked\r\n", "0\r\n\r\n"),
    ("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"),
    ("Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n"),
    ("X: a\r\n Content-Length: 0\r\n", ""),
    ("X: a\nContent-Length: 0\r\n", ""),
    ("Host: other\r\nContent-Length: 0\r\n", ""),
)
"""Fields, and what follows the head, that two parsers might read differently."""


async def smuggled(attack: Attack, *, per_s: float) -> None:
    """Requests with an ambiguous length, and another behind: only an error may come back."""
    behind = request(http1.MODELS, verb="GET", key=attack.order.key)
    made = itertools.cycle(
        request(http1.CHAT, body.encode() + behind, key=attack.order.key, length=-1, more=more)
        for more, body in _SMUGGLED
    )

    async def send(_: int) -> None:
        await attack.rate(per_s)
        data = next(made)
        async with opened(attack) as http:
            http.call()
            await http.send(data)
            status = await http.status()
            if status not in ("alone", "400", "413", "501") or await http.read():
                attack.broken[:] = [f"{data[:300]!r} got {status}, or something behind it"]

    await attack.times(50, send)


async def tiny_chunks(attack: Attack, *, connections: int, extension: str = "") -> None:
    """Bodies in chunks of a byte, until the server refuses them."""
    await _until_refused(attack, connections, b"", f"1{extension}\r\n \r\n".encode() * 8_000)


async def trailers(attack: Attack, *, connections: int) -> None:
    """Whole bodies with trailers that don't end, until the server refuses them."""
    body = http1.chat(1)
    begun = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    await _until_refused(attack, connections, begun, b"X:a\r\n" * 12_000)


async def _until_refused(attack: Attack, connections: int, begun: bytes, more: bytes) -> None:
    head = request(http1.CHAT, key=attack.order.key, length=-1, more=_CHUNKED)

    async def send(_: int) -> None:
        async with opened(attack) as http:
            http.call()
            await http.send(head + begun)
            while not attack.order.alone:
                await http.send(more)
            await http.status()

    await attack.times(connections, send)


async def kept(attack: Attack, *, count: int) -> None:
    """Connections that are kept after one request, and say nothing more."""
    data = request(http1.MODELS, verb="GET", key=attack.order.key)

    async def hold(_: int) -> None:
        await attack.rate(2_000)
        async with opened(attack) as http:
            http.call()
            await http.send(data)
            await http.status()
            while await http.read():
                pass
        await asyncio.sleep(_AGAIN_S)

    await attack.times(count, hold)


async def readers(
    attack: Attack, *, count: int, model: str, tokens: int, per_s: float, every_s: float = 0.0
) -> None:
    """Chats in events that nobody reads or, with ``every_s``, a byte at such times."""
    asked = json.dumps({**json.loads(http1.chat(tokens)), "model": model}).encode()
    data = request(http1.CHAT, asked, key=attack.order.key)

    async def hold(_: int) -> None:
        await attack.rate(per_s)
        async with opened(attack, receives_bytes=_RECEIVES_BYTES) as http:
            http.call()
            await http.send(data)
            while not http.gone:
                await asyncio.sleep(every_s or _AGAIN_S)
                if every_s and not await http.read(1):
                    break
        attack.tally.answers["closed"] += 1
        await asyncio.sleep(_AGAIN_S)

    await attack.times(count, hold)
