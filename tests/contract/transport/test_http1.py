"""HTTP/1.1 on the public port: one request after another, whatever a caller sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
import pytest_asyncio

from millstream_server.runtime.errors import InternalError, OverloadedError
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.rpc.limits import LimitsLayer, RpcLimits
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_server.runtime.transport.http_stream import Body
from millstream_testing.waiting import until
from tests.support.wire.http_service import OPTIONS, HttpService, Raw, http_service, post, raw
from tests.support.wire.raw_http2 import connected, request_fields


@pytest_asyncio.fixture
async def service() -> AsyncIterator[HttpService]:
    async with http_service() as served:
        yield served


@pytest_asyncio.fixture
async def wire(service: HttpService) -> AsyncIterator[Raw]:
    async with raw(service.port) as opened:
        yield opened


async def test_requests_follow_each_other_on_a_connection(wire: Raw) -> None:
    for body in (b"", b"abc", bytes(100_000)):
        wire.send(post("/echo", body, headers="X-Request-Id: mine\r\n"))
        status, headers, (answer,) = await wire.response()
        assert (status, answer) == (200, b"got %d" % len(body))
        assert headers["x-request-id"] == "mine"
        assert headers["content-type"] == "application/json"
        assert headers["date"].endswith("GMT")
        assert "connection" not in headers


async def test_pipelined_requests_are_answered_in_order(service: HttpService, wire: Raw) -> None:
    service.pieces = [b"data: a\n\n", b"data: b\n\n"]
    wire.send(b"".join([post("/echo", b"1"), post("/events"), post("/none"), post("/echo", b"22")]))
    assert [(await wire.response())[2] for _ in range(2)] == [[b"got 1"], service.pieces]
    assert (await wire.response())[0] == 404
    assert (await wire.response())[2] == [b"got 2"]


async def test_a_browsers_question_keeps_the_connection() -> None:
    asking = "Origin: https://a.example\r\nAccess-Control-Request-Method: POST\r\n"
    ask = f"OPTIONS /echo HTTP/1.1\r\nHost: x\r\n{asking}".encode()
    last = ask + b"Connection: close\r\n\r\n"
    async with (
        http_service(replace(OPTIONS, cors_origins={"*"})) as service,
        raw(service.port) as wire,
    ):
        wire.send(ask + b"\r\n" + post("/echo", b"1") + ask + b"\r\n" + post("/echo", b"22") + last)
        answers = [await wire.response() for _ in range(5)]
        assert await wire.reader.read() == b""
    assert [body for _, _, body in answers] == [[b""], [b"got 1"], [b""], [b"got 2"], [b""]]
    assert [headers.get("connection") for _, headers, _ in answers] == [None] * 4 + ["close"]
    assert answers[0][1]["access-control-allow-methods"] == "POST"


async def test_a_body_may_come_in_chunks_and_bytes(service: HttpService, wire: Raw) -> None:
    sent = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent += b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    for at in range(len(sent)):
        wire.send(sent[at : at + 1])
        await asyncio.sleep(0)
    assert (await wire.response())[2] == [b"got 5"]
    assert service.bodies == [b"abcde"]


async def test_events_are_chunks_and_one_is_a_whole_body(service: HttpService, wire: Raw) -> None:
    service.pieces = [b"data: 1\n\n", b"data: 2\n\n"]
    wire.send(post("/events"))
    status, headers, chunks = await wire.response()
    assert (status, chunks) == (200, service.pieces)
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    service.pieces = [b"{}"]
    wire.send(post("/whole"))
    assert (await wire.response())[1]["content-length"] == "2"


async def test_http_1_0_has_no_chunks_and_closes(service: HttpService, wire: Raw) -> None:
    service.pieces = [b"a", b"b"]
    wire.send(post("/events", version="1.0", headers="Connection: keep-alive\r\n"))
    status, headers, body = await wire.response()
    assert (status, body, headers["connection"]) == (200, [b"ab"], "close")


async def test_who_expects_it_is_told_to_send_the_body(wire: Raw) -> None:
    head = post("/echo", b"abc", headers="Expect: 100-continue\r\n")
    wire.send(head[:-3])
    assert (await wire.response(bare=True))[0] == 100
    wire.send(b"abc")
    assert (await wire.response())[2] == [b"got 3"]


async def test_without_a_key_the_body_is_not_asked_for() -> None:
    keys = AuthPolicy(keys=ApiKeys(inline="alice:secret-of-alice-that-is-long")).layers()
    async with http_service(layers=keys) as service, raw(service.port) as wire:
        wire.send(post("/echo", b"abc", headers="Expect: 100-continue\r\n")[:-3])
        status, headers, _ = await wire.response()
        assert (status, headers["connection"]) == (401, "close")
        assert await wire.closed()
    assert service.bodies == []


async def test_failures_have_a_status_and_when_to_retry(wire: Raw) -> None:
    wire.send(post("/busy"))
    status, headers, body = await wire.response()
    assert (status, headers["retry-after"], body) == (429, "3", [b"too much"])
    assert headers["x-request-id"].startswith("req-")
    wire.send(post("/echo"))
    assert (await wire.response())[0] == 200


@pytest.mark.parametrize(
    ("pieces", "status", "body"),
    [
        ([OverloadedError("no")], 429, [b"no"]),
        ([b"data: 1\n\n", InternalError("oh")], 200, [b"data: 1\n\n", b"data: oh\n\n"]),
    ],
)
async def test_a_failure_within_events_is_an_event(
    service: HttpService, wire: Raw, pieces: list[bytes | Exception], status: int, body: list[bytes]
) -> None:
    service.pieces = pieces
    wire.send(post("/events"))
    got, _, chunks = await wire.response()
    assert (got, chunks) == (status, body)
    wire.send(post("/echo"))
    assert (await wire.response())[0] == 200


async def test_a_failure_within_a_whole_body_cuts_the_connection(
    service: HttpService, wire: Raw
) -> None:
    service.pieces = [b"{", InternalError("oh")]
    wire.send(post("/whole"))
    with pytest.raises((asyncio.IncompleteReadError, ValueError, ConnectionResetError)):
        await wire.response()


async def test_a_caller_that_leaves_cancels_its_request(service: HttpService, wire: Raw) -> None:
    wire.send(post("/hang"))
    await until(lambda: service.waiting == 1)
    wire.writer.close()
    await until(lambda: service.cancelled == 1)


HOST = "POST /echo HTTP/1.1\r\nHost: x\r\n"
_STUFFED = f"1;{'e' * 200}\r\ny\r\n" * 5000 + "0\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HOST + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HOST + "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (HOST + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
        (HOST + "Content-Length: +3\r\n\r\nabc", 400),
        (HOST + "Content-Length: 3, 3\r\n\r\nabc", 400),
        (HOST + "Transfer-Encoding: gzip, chunked, identity\r\n\r\n0\r\n\r\n", 400),
        (HOST + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (HOST + "Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n", 501),
        (HOST + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
        (HOST + "X: a\r\n Content-Length: 3\r\n\r\nabc", 400),
        (HOST + "Transfer-Encoding: chunked\r\n\r\nx\r\n\r\n", 400),
        (HOST + "Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", 400),
        (HOST.replace("\r", "") + "\n", 400),
        (HOST + "Host: y\r\n\r\n", 400),
        *(
            (HOST.replace(": x", f": {host}") + "\r\n", 400)
            for host in ("x/y", "u@x", "x y", "x:y", "x:1:2", "[::1", "x\\y", "\xe9", "x?y", "<x>")
        ),
        ("POST /echo HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 400),
        ("POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("POST /echo HTTP/0.9\r\nHost: x\r\n\r\n", 505),
        (HOST + "X: " + "y" * 20_000 + "\r\n\r\n", 431),
        (HOST + f"Content-Length: {2 << 20}\r\n\r\n" + "y" * (2 << 20), 413),
        (HOST + "Transfer-Encoding: chunked\r\n\r\n200000\r\n" + "y" * 0x200000, 413),
        (HOST + "Transfer-Encoding: chunked\r\n\r\n" + _STUFFED, 400),
        (HOST + "Transfer-Encoding: chunked\r\n\r\n1\r\ny\r\n0\r\n" + "X: y\r\n" * 9000, 400),
    ],
)
async def test_what_is_ambiguous_or_too_large_is_refused_and_ends_the_connection(
    service: HttpService, wire: Raw, sent: str, status: int
) -> None:
    wire.send(sent.encode("latin-1") + post("/echo", b"smuggled"))
    got, headers, _ = await wire.response()
    assert (got, headers["connection"]) == (status, "close")
    assert await wire.closed()
    assert b"smuggled" not in service.bodies


async def test_what_follows_a_refusal_is_not_answered(service: HttpService, wire: Raw) -> None:
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    wire.send(b"nonsense\r\n\r\n")
    assert (await wire.response())[0] == 400
    wire.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert await wire.closed()
    await until(lambda: not service.server.connections)
    assert not failed


UPGRADES = [
    "Connection: Upgrade\r\nUpgrade: h2c\r\n",
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "connection: keep-alive, upgrade\r\nupgrade: websocket\r\n",
    "Connection: Upgrade\r\nUpgrade: TLS/1.2\r\n",
]
BODIES = [
    ("Content-Length: 5\r\n\r\nabcde", b"abcde"),
    ("Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nX: y\r\n\r\n", b"abcde"),
    ("Content-Length: 0\r\n\r\n", b""),
    ("\r\n", b""),
]


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize(("framed", "body"), BODIES)
async def test_an_upgrade_is_ignored_and_its_request_served(
    service: HttpService, wire: Raw, upgrade: str, framed: str, body: bytes
) -> None:
    """RFC 9110, 7.8; the connection stays one of HTTP/1.1."""
    asked = (HOST + upgrade + framed).encode()
    for size in (1, 7, len(asked)):  # bytewise, in parts, whole
        for at in range(0, len(asked), size):
            wire.send(asked[at : at + size])
            await asyncio.sleep(0)
        status, headers, (said,) = await wire.response()
        assert (status, said, "connection" in headers) == (200, b"got %d" % len(body), False)
        wire.send(post("/echo", b"next"))
        assert (await wire.response())[2] == [b"got 4"]
    assert service.bodies == [body, b"next"] * 3


@pytest.mark.parametrize("framed", [framed for framed, _ in BODIES])
@pytest.mark.parametrize("how", ["together", "later"])
async def test_what_follows_a_request_to_upgrade_is_not_read(
    service: HttpService, wire: Raw, framed: str, how: str
) -> None:
    """It may be of the other protocol, as long as no response has come."""
    asked = (HOST.replace("echo", "hang") + UPGRADES[0] + framed).encode()
    wire.send(asked + (post("/echo", b"smuggled") if how == "together" else b""))
    await until(lambda: service.waiting == 1)
    (connection,) = await _connections(service, 1)
    if how == "later":
        wire.send(post("/echo", b"smuggled"))
        await until(lambda: connection._reader.deaf)
    (stream,) = connection.streams.values()
    stream.fail(OverloadedError("over"))
    status, headers, _ = await wire.response()
    assert (status, headers["connection"]) == (429, "close")
    assert await wire.closed()
    assert service.bodies == []


async def test_a_body_behind_an_upgrade_waits_for_continue(wire: Raw) -> None:
    wire.send(post("/echo", b"abc", headers=UPGRADES[0] + "Expect: 100-continue\r\n")[:-3])
    assert (await wire.response(bare=True))[0] == 100
    wire.send(b"abc")
    assert (await wire.response())[2] == [b"got 3"]


@pytest.mark.parametrize("host", ["a", "a.b:1", "[::1]:80", "[fe80::1%25a]", "a_b", "", "a,b \t"])
async def test_hosts(wire: Raw, host: str) -> None:
    wire.send(HOST.replace(": x", f": {host}").encode() + b"Content-Length: 0\r\n\r\n")
    assert (await wire.response())[0] == 200


async def test_a_body_in_tiny_chunks_is_passed_on_in_large_pieces(
    wire: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece costs more than reading a hundred chunks."""
    pieces: list[int] = []
    feed = Body.feed

    def fed(body: Body, data: bytes, nbytes: int) -> int:
        pieces.append(len(data))
        return feed(body, data, nbytes)

    monkeypatch.setattr(Body, "feed", fed)
    sent = b"1\r\nx\r\n" * 50_000
    wire.send((HOST + "Transfer-Encoding: chunked\r\n\r\n").encode() + sent + b"0\r\n\r\n")
    assert (await wire.response())[2] == [b"got 50000"]
    assert sum(pieces) == 50_000
    # One a slice of 16 KiB, and one more a read, of which the kernel makes some 64 KiB.
    assert len(pieces) < len(sent) / 4096


@pytest.mark.parametrize("target", ["*", "/echo"])
async def test_options_of_the_server(service: HttpService, wire: Raw, target: str) -> None:
    wire.send(f"OPTIONS {target} HTTP/1.1\r\nHost: x\r\n{UPGRADES[1]}\r\n".encode())
    status, headers, _ = await wire.response()
    assert (status, headers.get("allow")) == (
        (200, "GET, HEAD, POST, OPTIONS") if target == "*" else (404, None)
    )
    async with connected(service.port) as http2:
        fields = request_fields(target, method="OPTIONS", content_type=None, te=None)
        assert (await http2.rpc(fields=fields, end=True).headers())[":status"] == str(status)


async def test_a_caller_may_not_send_much_ahead(service: HttpService, wire: Raw) -> None:
    wire.send(post("/hang") + post("/echo", bytes(10_000)) * 20)
    await until(lambda: service.waiting == 1)
    (connection,) = service.server.connections
    await until(lambda: connection.bounds.received.used == 0)
    (stream,) = connection.streams.values()
    stream.fail(OverloadedError("over"))
    assert (await wire.response())[0] == 429
    assert await wire.closed()


async def test_a_body_that_does_not_come_and_an_idle_connection_are_ended(
    service: HttpService, wire: Raw
) -> None:
    wire.send(post("/echo", b"abc")[:-3])
    (connection,) = await _connections(service, 1)
    await until(lambda: len(connection.silent) == 1)
    connection.tick(asyncio.get_running_loop().time() + 31)
    status, headers, (body,) = await wire.response()
    assert (status, headers["connection"]) == (400, "close")
    assert b"did not come within 30 s" in body
    async with raw(service.port) as idle:
        idle.send(post("/echo"))
        assert (await idle.response())[0] == 200
        (last,) = set(service.server.connections) - {connection}
        last.tick(asyncio.get_running_loop().time() + 600)
        idle.send(post("/echo"))
        assert (await idle.response())[0] == 200
        last.tick(asyncio.get_running_loop().time() + 700)
        assert await idle.closed()


async def test_who_has_brought_no_request_yet_goes_last(service: HttpService, wire: Raw) -> None:
    wire.send(post("/echo", b"abc")[:-1])
    (connection,) = await _connections(service, 1)
    await until(lambda: len(connection.silent) == 1)
    assert connection._intake.last
    wire.send(b"c")
    await wire.response()
    assert not connection._intake.last
    wire.send(b"POST")
    await until(lambda: connection._reader.begun)
    assert not connection._intake.last


async def test_a_reset_while_a_refusal_is_sent_harms_nobody(
    service: HttpService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(_: object) -> None:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", gone)
    service.server.bounds.work.turn_s = 0.0  # so its bytes wait for a turn with others'
    async with raw(service.port) as broken, raw(service.port) as other:
        broken.send(b"nonsense\r\n\r\n")
        assert (await broken.response())[0] == 400
        other.send(post("/echo"))
        assert (await other.response())[0] == 200
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


async def test_an_old_connection_ends_behind_its_next_response() -> None:
    options = replace(OPTIONS, max_connection_age_s=60.0)
    async with http_service(options) as service, raw(service.port) as wire:
        wire.send(post("/echo"))
        assert "connection" not in (await wire.response())[1]
        (connection,) = service.server.connections
        connection.tick(asyncio.get_running_loop().time() + 70)
        wire.send(post("/echo"))
        assert (await wire.response())[1]["connection"] == "close"
        assert await wire.closed()


async def _connections(service: HttpService, count: int) -> list[Any]:
    await until(lambda: len(service.server.connections) >= count)
    return list(service.server.connections)


async def test_of_many_that_are_lost_at_once_a_few_end_in_each_turn(service: HttpService) -> None:
    class Lost:
        ended = 0

        def lost(self) -> None:
            Lost.ended += 1

    for _ in range(20):
        service.server.lost(cast("Any", Lost()))
    seen = []
    for _ in range(4):
        seen.append(Lost.ended)
        await asyncio.sleep(0)
    assert seen == [0, 8, 16, 20]


async def test_limits_count_bodies_and_requests() -> None:
    limits = LimitsLayer(["http"], RpcLimits(max_open_streams=1, max_open_bytes=1000))
    async with (
        http_service(layers=[limits]) as service,
        raw(service.port) as one,
        raw(service.port) as two,
    ):
        one.send(post("/echo", bytes(1001)))
        assert (await one.response())[0] == 429
        one.send(post("/hang"))
        await until(lambda: service.waiting == 1)
        two.send(post("/echo"))
        assert (await two.response())[0] == 429


async def test_a_reader_that_stops_is_waited_for(service: HttpService) -> None:
    pieces: list[bytes | Exception] = [b"%d" % (i % 10) * 100_000 for i in range(100)]
    service.pieces = list(pieces)
    async with raw(service.port, limit=1 << 16) as wire:
        wire.send(post("/events"))
        (connection,) = await _connections(service, 1)
        await until(lambda: connection.stuck_bytes > 0)
        assert service.server.bounds.unsent.used < 2 << 20
        _, _, chunks = await wire.response()
        assert chunks == pieces
    await until(lambda: service.server.bounds.unsent.used == 0)


async def test_above_a_bound_who_holds_most_pays() -> None:
    options = replace(OPTIONS, max_silent_streams=1, max_received_bytes=400_000)
    async with (
        http_service(options) as service,
        raw(service.port) as one,
        raw(service.port) as two,
    ):
        one.send(post("/echo", bytes(300_000))[:-1])
        await until(lambda: service.server.bounds.received.used > 200_000)
        two.send(post("/echo", bytes(300_000))[:-1])
        answered, _ = await asyncio.wait(
            [asyncio.ensure_future(each.response()) for each in (one, two)],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert (await answered.pop())[0] == 429
