"""Random changes to requests of HTTP/1.1: nothing may fail inside, and nothing may stay.

    python -m tests.benchmarks.http1_fuzz --seconds 60 --seed 7

Bytes are changed, left out and put in, requests are cut and their connections reset. At the end a
server must hold no connection, no request and no byte, must have logged no error, and must answer.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import gc
import gzip
import logging
import random
import sys
import time

import uvloop

from millstream_server.runtime.transport.http1 import Http1Connection
from millstream_server.runtime.transport.web_stream import WebStream
from millstream_testing.waiting import until
from tests.support.wire.http_service import HttpService, http_service, post, raw
from tests.support.wire.rpc_kinds import SERVICE, Kinds

_CALLERS = 40
_CHUNKED = (
    b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
)
_FRAME = b"\0\0\0\0\4hang" + b"\0\0\0\0\3abc"


def _rpc(method: str, content_type: str, body: bytes, more: str = "") -> bytes:
    headers = f"Content-Type: application/{content_type}\r\n{more}"
    return post(f"/{SERVICE}/{method}", body, headers=headers)


_REQUESTS = (
    _rpc("Unary", "json", b"abc"),
    _rpc("Unary", "proto", gzip.compress(b"abc", mtime=0), "Content-Encoding: gzip\r\n"),
    _rpc("Unary", "grpc-web+proto", _FRAME[9:]),
    _rpc("Generator", "grpc-web-text", base64.b64encode(_FRAME[9:])),
    _rpc("Generator", "connect+proto", _FRAME[:9], "Connect-Timeout-Ms: 5\r\n"),
    _rpc("Chat", "connect+json", _FRAME[9:] * 3),
    _rpc("Gather", "grpc-web", _FRAME, "grpc-timeout: 1S\r\n"),
    post("/echo", b"abc"),
    post("/echo", b"abc") * 5,
    post("/events"),
    post("/busy"),
    post("/hang") + b"\0" * 10,
    post("/echo", b"abc", headers="Expect: 100-continue\r\n"),
    post("/none") + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    _CHUNKED + post("/whole"),
    post("/echo", b"abc", headers="Connection: Upgrade\r\nUpgrade: h2c\r\n") + post("/echo"),
    _CHUNKED.replace(b"\r\n\r\n", b"\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", 1),
    b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /echo HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
)
_PIECES = (b"\r\n", b"\n", b":", b"0\r\n\r\n", b"Content-Length: 4\r\n", b"\0")


class _Errors(logging.Handler):
    """Counts what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def _changed(draw: random.Random) -> bytes:
    data = bytearray(draw.choice(_REQUESTS) + draw.choice(_REQUESTS))
    for _ in range(draw.choice((0, 1, 1, 2, 5))):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randrange(1, 8)]
            case 2:
                data[at:at] = draw.randbytes(draw.randrange(1, 6))
            case _:
                data[at:at] = draw.choice(_PIECES)
    return bytes(data)


async def _call(service: HttpService, draw: random.Random) -> None:
    service.pieces = [b"data: 1\n\n", b"data: 2\n\n"]
    data, reset = _changed(draw), draw.random() < 0.5
    at = draw.randrange(len(data) + 1)
    with contextlib.suppress(OSError, TimeoutError):
        async with raw(service.port) as wire:
            wire.send(data[:at])
            await asyncio.sleep(0)
            wire.send(data[at:])
            if draw.random() < 0.3:
                wire.writer.write_eof()
            async with asyncio.timeout(draw.choice((0.005, 0.03))):
                await wire.reader.read(100_000)
            if reset:
                wire.writer.transport.abort()


async def _run(seconds: float, seed: int, errors: _Errors) -> list[str]:
    draw, until_s, calls = random.Random(seed), time.monotonic() + seconds, 0
    async with http_service() as service:
        kinds = Kinds()
        service.server.add_registered_method_handlers(SERVICE, kinds.by_name())

        async def caller() -> None:
            nonlocal calls
            while time.monotonic() < until_s:
                await _call(service, draw)
                calls += 1

        await asyncio.gather(*(caller() for _ in range(_CALLERS)))
        with contextlib.suppress(AssertionError):  # those that linger, and wait for their turn
            await until(lambda: not service.server.connections, within_s=20.0)
        bounds = service.server.bounds
        left = {
            "connections": len(service.server.connections),
            "requests": bounds.streams.used + bounds.silent.used,
            "bytes": bounds.received.used + bounds.unsent.used,
            "handlers": service.waiting - service.cancelled,
        }
        async with raw(service.port) as wire:
            wire.send(post("/echo", b"abc"))
            serves = (await wire.response())[2] == [b"got 3"]
        print(f"{calls} connections, seed {seed}; left: {left}")  # noqa: T201
    gc.collect()
    left["objects"] = sum(
        isinstance(each, Http1Connection | WebStream) for each in gc.get_objects()
    )
    wrong = [f"{count} {what} stayed" for what, count in left.items() if count]
    wrong += [] if serves else ["the server doesn't answer any more"]
    return wrong + errors.lines[:5]


def main() -> None:
    """Parse arguments, run; exit with 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.http1_fuzz")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    wrong = uvloop.run(_run(given.seconds, given.seed, errors))
    print("\n".join(wrong) or "nothing is wrong")  # noqa: T201
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
