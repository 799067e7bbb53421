"""Connections that bring nothing, or something else than HTTP/2."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from tests.benchmarks.hostile import wire
from tests.benchmarks.hostile.attacker import Attack
from tests.benchmarks.hostile.attacks import methods

_BATCH = 50
_LOST_PAUSE_S = 0.5
_SETTLED_S = 1.0


@contextlib.asynccontextmanager
async def _opened(
    attack: Attack,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", attack.order.port, local_addr=attack.source(), limit=1 << 12
    )
    attack.tally.connections += 1
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def idle(
    attack: Attack, *, count: int, greeting: bytes = b"", per_s: float = 2_000.0
) -> None:
    """Connections that send ``greeting`` and no more; each that is closed is made again."""

    async def hold(_: int) -> None:
        if per_s:
            await attack.rate(per_s)
        async with _opened(attack) as (reader, writer):
            writer.write(greeting)
            attack.tally.sent_bytes += len(greeting)
            while await reader.read(1 << 12):
                pass
        attack.tally.answers["connection closed"] += 1
        await asyncio.sleep(_LOST_PAUSE_S)

    await attack.times(count, hold)


async def handshakes(attack: Attack, *, count: int, per_s: float = 2_000.0) -> None:
    """TLS handshakes that stop within the first message."""
    await idle(attack, count=count, greeting=_client_hello()[:100], per_s=per_s)


async def whole_hellos(attack: Attack, *, count: int, per_s: float = 2_000.0) -> None:
    """TLS handshakes that stop when the server has done its costly part."""
    await idle(attack, count=count, greeting=_client_hello(), per_s=per_s)


async def headers_begun(attack: Attack, *, count: int, within_s: float) -> None:
    """Headers that begin and don't end, their pings answered: the server has to end them."""
    begun = wire.frame(wire.HEADERS, 0, 1, wire.headers(methods.CHAT))

    async def hold(_: int) -> None:
        await attack.rate(500)
        connection = await attack.connect()
        connection.next_stream()
        await asyncio.sleep(_SETTLED_S)  # SETTINGS are acknowledged: nothing follows by itself
        await connection.send(begun)
        began = asyncio.get_running_loop().time()
        while not connection.closed:
            if asyncio.get_running_loop().time() - began > within_s and not attack.order.alone:
                attack.broken[:] = [f"headers that don't end are waited for above {within_s:g} s"]
            await asyncio.sleep(0.25)
        await asyncio.sleep(_LOST_PAUSE_S)

    await attack.times(count, hold)


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="processor").do_handshake()
    return outgoing.read()


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


async def _list_models(channel: Any) -> None:
    await channel.unary_unary(methods.LIST_MODELS)(methods.LIST_REQUEST, timeout=5)


async def certificate(attack: Attack, *, files: list[str], name: str) -> None:
    """Call with a certificate of the same CA that names somebody else: it must be refused."""
    async with grpc.aio.secure_channel(
        f"127.0.0.1:{attack.order.port}",
        grpc.ssl_channel_credentials(*map(_read, files)),
        options=[("grpc.ssl_target_name_override", name)],
    ) as channel:
        try:
            await _list_models(channel)
        except grpc.aio.AioRpcError as error:
            attack.tally.answers[error.code().name] += 1
            refused = error.code() in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNAVAILABLE,
            )
            if not refused:
                attack.broken.append(f"the certificate was answered {error.code().name}")
        else:
            attack.broken.append("a certificate whose name is of another kind may call")


async def churn(attack: Attack, *, per_s: float, greeting: bytes = b"") -> None:
    """Connections that are made, say ``greeting`` and go."""

    async def come_and_go(_: int) -> None:
        await attack.rate(per_s)
        async with _opened(attack) as (_reader, writer):
            writer.write(greeting)
            attack.tally.sent_bytes += len(greeting)
            await asyncio.sleep(0)

    await attack.times(_BATCH, come_and_go)


async def garbage(attack: Attack, *, per_s: float) -> None:
    """Connections that speak another protocol."""
    await churn(attack, per_s=per_s, greeting=b"\x16\x03\x01GARBAGE\r\n\r\n" * 100)
