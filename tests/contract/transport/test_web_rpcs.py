"""gRPC-web and Connect on the public port: the bytes of good calls, on both versions of HTTP."""

from __future__ import annotations

import base64
import gzip
import json

import httpx
import pytest

from millstream.v1 import processor_pb2
from millstream_testing.waiting import until
from tests.support.wire.raw_http2 import Setting, connected, request_fields, settings, window_update
from tests.support.wire.web_service import (
    BIDI,
    CONNECT,
    CONNECT_JSON,
    JSON,
    PROTO,
    STREAM,
    TEXT,
    UNARY,
    WEB,
    WebService,
    asked,
    call,
    frame,
    frames,
    from_base64,
    texts,
    trailers,
)

ABC = processor_pb2.TokenizeRequest(text="abc").SerializeToString()


# ---- good calls ----------------------------------------------------------------------------------


async def test_connect_unary_is_a_message_and_its_trailers_are_headers(
    client: httpx.AsyncClient,
) -> None:
    got = await call(client, UNARY, PROTO, ABC)
    assert (got.status_code, got.headers["content-type"]) == (200, PROTO)
    assert list(processor_pb2.TokenizeResponse.FromString(got.content).token_ids) == [0, 1, 2]
    assert (got.headers["trailer-x-cost"], got.headers["trailer-x-raw-bin"]) == ("7", "/wA")


async def test_connect_stream_ends_with_a_message_of_json(client: httpx.AsyncClient) -> None:
    got = await call(client, STREAM, CONNECT, frame(asked("one two")))
    assert (got.status_code, got.headers["content-type"]) == (200, CONNECT)
    *messages, (flags, end) = frames(got.content)
    assert texts([payload for _, payload in messages]) == ["one", "two"]
    assert (flags, json.loads(end)) == (2, {"metadata": {"x-cost": ["7"]}})


async def test_connect_stream_of_json(client: httpx.AsyncClient) -> None:
    got = await call(client, STREAM, CONNECT_JSON, frame(b'{"text": "one two"}'))
    *messages, (flags, _) = frames(got.content)
    assert texts([payload for _, payload in messages], json_=True) == ["one", "two"]
    assert flags == 2


@pytest.mark.parametrize("content_type", [WEB, "application/grpc-web", TEXT])
async def test_grpc_web_ends_with_a_frame_of_trailers(
    client: httpx.AsyncClient, content_type: str
) -> None:
    text = content_type == TEXT
    sent = frame(asked("one two"))
    got = await call(client, STREAM, content_type, base64.b64encode(sent) if text else sent)
    assert (got.status_code, got.headers["content-type"]) == (200, TEXT if text else WEB)
    *messages, (flags, end) = frames(from_base64(got.content) if text else got.content)
    assert texts([payload for _, payload in messages]) == ["one", "two"]
    assert (flags, trailers(end)) == (0x80, {"grpc-status": "0", "x-cost": "7"})


async def test_grpc_web_unary(client: httpx.AsyncClient) -> None:
    got = await call(client, UNARY, WEB, frame(ABC))
    (_, message), (_, end) = frames(got.content)
    assert list(processor_pb2.TokenizeResponse.FromString(message).token_ids) == [0, 1, 2]
    assert trailers(end) == {"grpc-status": "0", "x-cost": "7", "x-raw-bin": "/wA"}


@pytest.mark.parametrize("content_type", [WEB, CONNECT])
async def test_a_body_may_have_all_messages_of_a_stream(
    client: httpx.AsyncClient, content_type: str
) -> None:
    sent = [frame(processor_pb2.ParseRequest(text=t).SerializeToString()) for t in "ab"]
    got = await call(client, BIDI, content_type, b"".join(sent))
    *messages, _ = frames(got.content)
    parsed = [processor_pb2.ParseResponse.FromString(m).events[0].text for _, m in messages]
    assert parsed == ["a", "b"]


async def test_connect_is_full_duplex_on_http2(service: WebService) -> None:
    async with connected(service.port) as wire:
        rpc = wire.rpc(fields=request_fields(BIDI, content_type=CONNECT, te=None))
        for text in "ab":
            rpc.send(processor_pb2.ParseRequest(text=text).SerializeToString())
            answer = processor_pb2.ParseResponse.FromString(await rpc.next())
            assert answer.events[0].text == text
        rpc.send_raw(b"", end=True)
        assert json.loads(await rpc.next()) == {}


@pytest.mark.parametrize(
    ("path", "content_type", "header"),
    [
        (UNARY, PROTO, "content-encoding"),
        (STREAM, CONNECT, "connect-content-encoding"),
        (STREAM, WEB, "grpc-encoding"),
    ],
)
async def test_requests_may_be_compressed(
    client: httpx.AsyncClient, path: str, content_type: str, header: str
) -> None:
    packed = gzip.compress(ABC if path == UNARY else asked("one two"))
    body = packed if path == UNARY else frame(packed, 1)
    got = await call(client, path, content_type, body, **{header: "gzip"})
    assert got.status_code == 200
    refused = await call(client, path, content_type, body, **{header: "br"})
    assert b"the compression 'br' is none of identity, gzip, deflate" in refused.content
    assert (b"unimplemented" in refused.content) or (b"grpc-status: 12" in refused.content)


async def test_metadata_is_read_as_grpc_has_it(
    service: WebService, client: httpx.AsyncClient
) -> None:
    headers = {"x-own": "mine", "x-own-bin": "/wA", "connect-protocol-version": "1"}
    await call(client, UNARY, PROTO, ABC, connect_timeout_ms="60000", **headers)
    got = dict(service.metadata)
    assert (got["x-own"], got["x-own-bin"]) == ("mine", b"\xff\0")
    assert not {name for name in got if name.startswith(("connect-", "content-", ":"))}
    assert service.time_left_s is not None
    assert 50 < service.time_left_s <= 60


@pytest.mark.parametrize(("words", "sizes"), [("800000 900000", [800_000, 900_000])])
@pytest.mark.parametrize("content_type", [WEB, TEXT, CONNECT, CONNECT_JSON])
async def test_large_messages_wait_for_room(
    client: httpx.AsyncClient, content_type: str, words: str, sizes: list[int]
) -> None:
    body = b'{"text": "%b"}' % words.encode() if content_type == CONNECT_JSON else asked(words)
    sent = base64.b64encode(frame(body)) if content_type == TEXT else frame(body)
    got = await call(client, STREAM, content_type, sent)
    content = from_base64(got.content) if content_type == TEXT else got.content
    *messages, _ = frames(content)
    found = texts([m for _, m in messages], json_=content_type == CONNECT_JSON)
    assert [len(text) for text in found] == sizes


@pytest.mark.parametrize("content_type", [PROTO, JSON])
async def test_a_large_unary_response(client: httpx.AsyncClient, content_type: str) -> None:
    request = b'{"text": "300000"}'
    if content_type == PROTO:
        request = processor_pb2.TokenizeRequest(text="300000").SerializeToString()
    got = await call(client, UNARY, content_type, request)
    if content_type == JSON:
        assert len(got.json()["tokenIds"]) == 300_000
    else:
        assert len(processor_pb2.TokenizeResponse.FromString(got.content).token_ids) == 300_000


async def test_the_end_waits_for_a_window_that_is_full(service: WebService) -> None:
    async with connected(service.port) as wire:
        wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 10}))
        rpc = wire.rpc(fields=request_fields(STREAM, content_type=WEB, te=None))
        rpc.send(asked("one"), end=True)
        await wire.until(lambda: len(rpc.received) == 10)
        wire.send(window_update(rpc.stream, 15))
        await wire.until(lambda: len(rpc.received) == 25)
        assert not rpc.over
        wire.send(window_update(rpc.stream, 1000))
        await wire.until(lambda: rpc.over)
        *_, (flags, end) = frames(rpc.received)
        assert (flags, trailers(end)["grpc-status"]) == (0x80, "0")


async def test_who_leaves_while_the_end_waits_is_forgotten(service: WebService) -> None:
    async with connected(service.port) as wire:
        wire.send(settings({Setting.INITIAL_WINDOW_SIZE: 10}))
        rpc = wire.rpc(fields=request_fields(STREAM, content_type=WEB, te=None))
        rpc.send(asked("one"), end=True)
        await wire.until(lambda: len(rpc.received) == 10)
        wire.send(window_update(rpc.stream, 10))
        await wire.until(lambda: len(rpc.received) == 20)
        rpc.reset()
        await wire.answered()
    await until(lambda: not service.server.connections)
    assert service.server.bounds.unsent.used == service.server.bounds.streams.used == 0
