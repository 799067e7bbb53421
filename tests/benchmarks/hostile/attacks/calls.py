"""Calls that are expensive to serve, expensive to refuse, or just many."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Iterator

from tests.benchmarks.hostile import wire
from tests.benchmarks.hostile.attacker import Attack
from tests.benchmarks.hostile.attacks import methods

_CONNECTIONS = 4
FORGED = "forged-by-a-caller"


async def flood(
    attack: Attack,
    *,
    path: str,
    request: bytes = b"",
    at_once: int = 64,
    more: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Unary calls, ``at_once`` at any time, each followed by the next."""
    block = wire.headers(path, attack.order.key, more)
    body = wire.message(request)

    async def caller(_: int) -> None:
        connection = await attack.connect(window=1 << 20)

        async def call() -> None:
            while not connection.closed:
                stream = connection.next_stream(awaited=True)
                opening = wire.opening(stream, block)
                if len(body) < wire.MAX_FRAME:
                    await connection.send(
                        opening + wire.frame(wire.DATA, wire.END_STREAM, stream, body)
                    )
                else:
                    await connection.send(opening)
                    await connection.upload(stream, body, end=True)
                await connection.end(stream)

        await asyncio.gather(*(call() for _ in range(max(1, at_once // _CONNECTIONS))))

    await attack.times(min(_CONNECTIONS, at_once), caller)


async def health_checks(attack: Attack) -> None:
    """Health checks without end."""
    await flood(attack, path=methods.CHECK, request=methods.CHECK_REQUEST)


async def list_models(attack: Attack) -> None:
    """Lists of models without end."""
    await flood(attack, path=methods.LIST_MODELS, request=methods.LIST_REQUEST)


async def unknown_methods(attack: Attack) -> None:
    """Calls of a method that isn't there."""
    await flood(attack, path="/millstream.v1.NoService/Nothing")


async def tokenize_texts(attack: Attack) -> None:
    """30 callers that tokenize texts of 3.9 MiB."""
    text = "What is Millstream? " * (int(3.9 * (1 << 20)) // 20)
    await flood(attack, path=methods.TOKENIZE, request=methods.tokenize(text), at_once=30)


async def tool_patterns(attack: Attack) -> None:
    """Tools whose schemas have an expensive pattern; their callers leave after half a second."""
    schema = json.dumps({"type": "string", "pattern": "(?i)" + r"[A-\uffff]" * 1_000})
    block = wire.headers(methods.TOKENIZE, attack.order.key)
    body = wire.message(methods.tokenize_tool(schema))

    async def call(_: int) -> None:
        connection = await attack.connect()
        stream = connection.next_stream()
        await connection.send(wire.opening(stream, block))
        await connection.upload(stream, body, end=True)
        await asyncio.sleep(0.5)
        connection.close()
        await asyncio.sleep(0.5)

    await attack.times(2, call)


async def schemas_in_themselves(attack: Attack) -> None:
    """Answers whose tool has a schema that refers to itself three times."""
    itself = {"$ref": "#/$defs/x"}
    schema = {"properties": {"a": itself}, "$defs": {"x": {"anyOf": [itself] * 3}}}
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    asked = methods.parse("qwen-xml", text, schema=json.dumps(schema))
    await flood(attack, path=methods.PARSE, request=asked, at_once=16)


async def continued_markers(attack: Attack) -> None:
    """Answers that go on in 77 kB of a marker that begins no call."""
    asked = methods.parse("glm-kv", "So.", begun="<tool_call>" * 7_000 + "So. " * 200)
    await flood(attack, path=methods.PARSE, request=asked, at_once=16)


async def huge_metadata(attack: Attack, *, size: int) -> None:
    """Metadata of ``size`` bytes in each call."""
    value = b"v" * 1_000
    more = [(b"x-%d" % i, value) for i in range(size // 1_000)]
    await flood(attack, path=methods.LIST_MODELS, request=methods.LIST_REQUEST, more=more)


async def header_bomb(attack: Attack, *, size: int, times: int, per_s: float) -> None:
    """A value put into the HPACK table once, and named ``times`` in every call."""
    entry = wire.literal(b"x-bomb", b"v" * size, indexed=True)
    await _from_table(attack, itertools.repeat(entry), times, per_s, renewed=False)


async def header_names(attack: Attack, *, size: int, times: int, per_s: float) -> None:
    """A name of ``size`` bytes in the HPACK table, named ``times`` in calls of 33 bytes more."""
    entry = wire.literal(b"n" * size, b" ", indexed=True)
    await _from_table(attack, itertools.repeat(entry), times, per_s, renewed=False)


async def trailer_names(attack: Attack, *, size: int, times: int) -> None:
    """The same in trailers."""
    block = wire.headers(methods.CHAT, attack.order.key)
    entry = wire.literal(b"n" * size, b" ", indexed=True)

    async def call(_: int) -> None:
        connection = await attack.connect()
        trailers = entry
        while True:
            stream = connection.next_stream()
            trailers += b"\xbe" * times
            await connection.send(
                wire.opening(stream, block) + wire.opening(stream, trailers, end=True)
            )
            trailers = b""

    await attack.times(_CONNECTIONS, call)


async def not_utf8(attack: Attack, *, times: int, per_s: float) -> None:
    """Metadata that isn't text, another value in every call, named ``times``."""
    values = (b"\xff\xfe" * 10 + b"%d" % number for number in itertools.count())
    entries = (wire.literal(b"x-bad", value, indexed=True) for value in values)
    await _from_table(attack, entries, times, per_s, renewed=True)


async def _from_table(
    attack: Attack, entries: Iterator[bytes], times: int, per_s: float, *, renewed: bool
) -> None:
    """Call with a header of the HPACK table; ``renewed``: each call puts another one there."""
    plain = wire.headers(methods.LIST_MODELS, attack.order.key)
    body = wire.message(methods.LIST_REQUEST)

    async def call(_: int) -> None:
        connection = await attack.connect()
        block = plain + next(entries)
        while True:
            if per_s:
                await attack.rate(per_s)
            stream = connection.next_stream()
            await connection.send(
                wire.opening(stream, block + b"\xbe" * times)  # entry 62, the table's newest
                + wire.frame(wire.DATA, wire.END_STREAM, stream, body)
            )
            block = plain + (next(entries) if renewed else b"")

    await attack.times(_CONNECTIONS, call)


async def path_not_utf8(attack: Attack) -> None:
    """One HEADERS frame with a `:path` that isn't text; again every 100 ms."""

    async def call(_: int) -> None:
        connection = await attack.connect()
        while True:
            stream = connection.next_stream()
            await connection.send(wire.opening(stream, wire.headers(b"/\xff\xfe/\xff"), end=True))
            await asyncio.sleep(0.1)

    await attack.times(1, call)


async def request_ids(attack: Attack) -> None:
    """Request ids that look like fields of a log line."""
    request_id = f"a outcome=ok {FORGED}=yes"
    block = wire.headers(methods.CHAT, attack.order.key)
    body = wire.message(methods.chat(2, request_id=request_id))

    async def call(_: int) -> None:
        connection = await attack.connect()
        for _turn in range(20):
            stream = connection.next_stream(awaited=True)
            await connection.send(wire.opening(stream, block))
            await connection.upload(stream, body, end=True)
            await connection.end(stream)
        await asyncio.sleep(attack.order.seconds)

    await attack.times(1, call)


async def leave_midway(attack: Attack, *, per_s: float) -> None:
    """Chats that are reset, and connections that are cut, while the answer is being written."""
    block = wire.headers(methods.CHAT, attack.order.key)
    body = wire.message(methods.chat(200))

    async def call(number: int) -> None:
        connection = await attack.connect()
        streams = []
        for _ in range(10):
            await attack.rate(per_s)
            stream = connection.next_stream()
            streams.append(stream)
            await connection.send(wire.opening(stream, block))
            await connection.upload(stream, body)
        await asyncio.sleep(0.02 + 0.003 * (number % 10))
        if number % 2:
            for stream in streams:
                await connection.send(wire.reset(stream))
        connection.close()

    await attack.times(8, call)
