"""gRPC's messages at the wire: how frames cut them, how long they are, how they are packed."""

from __future__ import annotations

import gc
import gzip
import tracemalloc
from urllib.parse import unquote

import pytest

from millstream_server.runtime.errors import Code
from tests.contract.transport.conftest import LIMIT, UNARY, InteropServer
from tests.support.wire.interop_service import SERVICE, ask
from tests.support.wire.raw_http2 import ErrorCode, Kind, Wire, connected, data, frame, message

pytestmark = pytest.mark.asyncio(loop_scope="module")

BIDI, GATHER = f"/{SERVICE}/Bidi", f"/{SERVICE}/ClientStream"

# ---- messages ------------------------------------------------------------------------------------


async def test_several_messages_in_one_frame(wire: Wire) -> None:
    rpc = wire.rpc(BIDI)
    rpc.send_raw(b"".join(message(ask(size)) for size in (1, 0, 3)), end=True)
    assert await rpc.code() == Code.OK
    assert rpc.messages == [bytes(1), b"", bytes(3)]


async def test_a_message_in_frames_of_one_byte(wire: Wire) -> None:
    rpc = wire.rpc(BIDI)
    for byte in message(ask(7)):
        rpc.send_raw(bytes([byte]))
        rpc.send_raw(b"")
    rpc.send_raw(b"", end=True)
    assert await rpc.code() == Code.OK
    assert rpc.messages == [bytes(7)]


async def test_a_message_across_frames_and_another(wire: Wire) -> None:
    rpc = wire.rpc(GATHER)
    sent = b"".join(message(ask(payload=bytes(size))) for size in (20_000, 1, 0, 30_000))
    for part in _parts(sent):
        rpc.send_raw(part)
    wire.send(wire.headers(rpc.stream, [("x-trailer", "1")], end=True))
    assert await rpc.code() == Code.OK
    assert rpc.messages == [b"50001"]


def _parts(sent: bytes) -> list[bytes]:
    return [sent[i : i + 9_999] for i in range(0, len(sent), 9_999)]


async def test_padded_frames(wire: Wire) -> None:
    rpc = wire.rpc(UNARY)
    sent = message(ask(2))
    wire.send(
        frame(Kind.DATA, rpc.stream, b"\x03" + sent[:4] + bytes(3), 0x8),
        frame(Kind.DATA, rpc.stream, b"\x00" + sent[4:], 0x9),
    )
    assert await rpc.code() == Code.OK
    assert rpc.messages == [bytes(2)]


@pytest.mark.parametrize("sent", [b"\0", message(ask(1))[:-1], message(b"")[:4]])
async def test_half_a_message_at_the_end(wire: Wire, sent: bytes) -> None:
    for path in (UNARY, BIDI):
        rpc = wire.rpc(path)
        rpc.send_raw(sent, end=True)
        ended = await rpc.end()
        assert ended["grpc-status"] == str(int(Code.INTERNAL))
        assert unquote(ended["grpc-message"]) == "the request ends in the middle of a message"


async def test_no_message_for_one(wire: Wire) -> None:
    ended = await wire.rpc(UNARY, end=True).end()
    assert ended["grpc-status"] == str(int(Code.UNIMPLEMENTED))
    assert unquote(ended["grpc-message"]) == "the request message is missing"


@pytest.mark.parametrize("at_once", [True, False])
async def test_two_messages_for_one(wire: Wire, at_once: bool) -> None:  # noqa: FBT001
    """Also when the handler runs already."""
    rpc = wire.rpc(UNARY)
    hanging = ask(hang=True)
    if at_once:
        rpc.send_raw(message(hanging) * 2, end=True)
    else:
        rpc.send(hanging)
        await wire.answered()
        rpc.send(hanging, end=True)
    ended = await rpc.end()
    assert ended["grpc-status"] == str(int(Code.INTERNAL))
    assert "takes one request message" in unquote(ended["grpc-message"])


@pytest.mark.parametrize("size", [LIMIT + 1, (1 << 32) - 1])
async def test_a_long_message_is_refused_by_its_prefix(wire: Wire, size: int) -> None:
    rpc = wire.rpc(BIDI)
    rpc.send_raw(message(b"", length=size))
    ended = await rpc.end()
    assert ended["grpc-status"] == str(int(Code.RESOURCE_EXHAUSTED))
    assert str(LIMIT) in unquote(ended["grpc-message"])


async def test_a_message_of_the_longest_size(wire: Wire) -> None:
    rpc = wire.rpc(GATHER)
    padding = LIMIT - len(ask())
    sent = message(ask(payload=bytes(padding)))
    for part in _parts(sent):
        rpc.send_raw(part)
        await wire.answered()  # the window is open again
    rpc.send_raw(b"", end=True)
    assert await rpc.code() == Code.OK
    assert rpc.messages == [str(padding).encode()]


# ---- compression ---------------------------------------------------------------------------------


async def test_gzip_by_message(wire: Wire) -> None:
    rpc = wire.rpc(BIDI, [("grpc-encoding", "gzip")])
    rpc.send(gzip.compress(ask(1)), compressed=1)
    rpc.send(ask(2))
    rpc.send(gzip.compress(ask(3)), compressed=1, end=True)
    assert await rpc.code() == Code.OK
    assert rpc.messages == [bytes(1), bytes(2), bytes(3)]


@pytest.mark.parametrize("metadata", [[], [("grpc-encoding", "identity")]])
async def test_the_flag_without_an_encoding(wire: Wire, metadata: list[tuple[str, str]]) -> None:
    rpc = wire.rpc(BIDI, metadata)
    rpc.send(gzip.compress(ask(1)), compressed=1, end=True)
    assert await rpc.code() == Code.INTERNAL


@pytest.mark.parametrize("encoding", ["br", "gzip2", ""])
async def test_an_unknown_encoding(wire: Wire, encoding: str) -> None:
    rpc = wire.rpc(BIDI, [("grpc-encoding", encoding)])
    rpc.send(b"?", compressed=1, end=True)
    ended = await rpc.end()
    assert ended["grpc-status"] == str(int(Code.UNIMPLEMENTED))
    accepted = ended.get("grpc-accept-encoding") or (await rpc.headers())["grpc-accept-encoding"]
    assert "gzip" in accepted.replace(" ", "").split(",")


@pytest.mark.parametrize("flag", [2, 255])
async def test_an_unknown_flag(wire: Wire, flag: int) -> None:
    rpc = wire.rpc(BIDI, [("grpc-encoding", "gzip")])
    rpc.send(ask(1), compressed=flag, end=True)
    assert await rpc.code() == Code.INTERNAL


@pytest.mark.parametrize(
    "sent",
    [b"", b"\x1f\x8b", b"no gzip at all", gzip.compress(ask(1), mtime=0)[:-5]],
    ids=["empty", "short", "another", "cut off"],  # the same in every process that collects tests
)
async def test_gzip_that_is_damaged(wire: Wire, sent: bytes) -> None:
    rpc = wire.rpc(BIDI, [("grpc-encoding", "gzip")])
    rpc.send(sent, compressed=1, end=True)
    ended = await rpc.end()
    assert ended["grpc-status"] == str(int(Code.INTERNAL))
    assert "a compressed message" in unquote(ended["grpc-message"])


async def test_a_gzip_bomb_is_not_unpacked(wire: Wire) -> None:
    bomb = gzip.compress(bytes(32 << 20))
    rpc = wire.rpc(BIDI, [("grpc-encoding", "gzip")])
    tracemalloc.start()
    try:
        rpc.wire.send(*(data(rpc.stream, part) for part in _parts(message(bomb, compressed=1))))
        assert await rpc.code() == Code.RESOURCE_EXHAUSTED
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


async def test_what_was_unpacked_of_gzip_bombs_waits_for_no_collector(wire: Wire) -> None:
    bomb = message(gzip.compress(bytes(32 << 20)), compressed=1)
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(4):
            rpc = wire.rpc(BIDI, [("grpc-encoding", "gzip")])
            wire.send(*(data(rpc.stream, part) for part in _parts(bomb)))
            assert await rpc.code() == Code.RESOURCE_EXHAUSTED
        await wire.answered()
        assert tracemalloc.get_traced_memory()[0] < LIMIT
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_a_flood_of_empty_frames(served: InteropServer) -> None:
    """It's served, or its connection is closed; the next one is served."""
    async with connected(served.port) as wire:
        rpc = wire.rpc(BIDI)
        for _ in range(200):
            wire.send(data(rpc.stream) * 100)
            await wire.drained()
        rpc.send(ask(1))
        await wire.until(lambda: bool(rpc.messages) or wire.closed)
        if wire.closed:
            assert wire.of(Kind.GOAWAY)[0].error_code is ErrorCode.ENHANCE_YOUR_CALM
    async with connected(served.port) as wire:
        rpc = wire.rpc(UNARY)
        rpc.send(ask(), end=True)
        assert await rpc.code() == Code.OK
