"""gRPC-web and Connect: how failures are said, and what callers may send that is malformed."""

from __future__ import annotations

import base64
import gzip
import json

import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.security.api_keys import ApiKeys
from tests.support.wire.raw_http2 import connected, request_fields
from tests.support.wire.web_service import (
    CONNECT,
    CONNECT_JSON,
    JSON,
    PROTO,
    SERVICE,
    STREAM,
    TEXT,
    UNARY,
    WEB,
    Version,
    WebService,
    asked,
    call,
    caller,
    frame,
    frames,
    from_base64,
    texts,
    trailers,
    web_service,
)

# ---- failures ------------------------------------------------------------------------------------


async def test_connect_says_a_failure_of_a_unary_call_with_http_status(
    client: httpx.AsyncClient,
) -> None:
    got = await call(client, UNARY, JSON, b'{"text": "bad"}')
    assert (got.status_code, got.headers["content-type"]) == (400, JSON)
    assert got.headers["trailer-x-cost"] == "7"
    said = got.json()
    assert (said["code"], said["message"]) == ("invalid_argument", "text: is bad")
    by_type = {detail["type"]: detail for detail in said["details"]}
    info = by_type["google.rpc.ErrorInfo"]
    value = base64.b64decode(info["value"] + "==")
    assert error_details_pb2.ErrorInfo.FromString(value).reason == "INVALID_REQUEST"
    violations = by_type["google.rpc.BadRequest"]["debug"]["fieldViolations"]
    assert violations == [{"field": "text", "description": "is bad"}]


async def test_connect_says_a_failure_of_a_stream_at_its_end(client: httpx.AsyncClient) -> None:
    got = await call(client, STREAM, CONNECT, frame(asked("one bad")))
    (_, message), (flags, end) = frames(got.content)
    assert (got.status_code, texts([message]), flags) == (200, ["one"], 2)
    error = json.loads(end)["error"]
    assert (error["code"], error["message"]) == ("resource_exhausted", "no more")
    retry = next(d for d in error["details"] if d["type"] == "google.rpc.RetryInfo")
    assert retry["debug"] == {"retryDelay": "2.500s"}


async def test_grpc_web_says_a_failure_in_its_trailers(client: httpx.AsyncClient) -> None:
    got = await call(client, STREAM, WEB, frame(asked("one bad")))
    (_, message), (flags, end) = frames(got.content)
    assert (got.status_code, texts([message]), flags) == (200, ["one"], 0x80)
    said = trailers(end)
    assert (said["grpc-status"], said["grpc-message"]) == ("8", "no more")
    assert said["grpc-retry-pushback-ms"] == "2500"
    details = base64.b64decode(said["grpc-status-details-bin"] + "==")
    assert [d.type_url for d in status_pb2.Status.FromString(details).details] == [
        "type.googleapis.com/google.rpc.ErrorInfo",
        "type.googleapis.com/google.rpc.RetryInfo",
    ]


async def test_a_bug_is_said_without_its_text(client: httpx.AsyncClient) -> None:
    got = await call(client, UNARY, JSON, b'{"text": "bug"}')
    assert (got.status_code, got.json()["code"]) == (500, "internal")
    assert b"a bug" not in got.content


async def test_without_a_key_no_message_is_read(version: Version) -> None:
    keys = AuthPolicy(keys=ApiKeys(inline="alice:secret-of-alice-that-is-long")).layers()
    async with web_service(layers=keys) as service, caller(service.port, version) as client:
        for path in (UNARY, f"/{SERVICE}/Nothing"):
            got = await call(client, path, JSON, b"no json")
            assert (got.status_code, got.json()["code"]) == (401, "unauthenticated")
        got = await call(client, STREAM, JSON, b"{}")
        assert got.json()["code"] == "unauthenticated"
        # Nor does the caller learn which methods there are, by what doesn't fit to one.
        for path in (UNARY, STREAM, f"/{SERVICE}/Nothing"):
            for sent in (frame(b"{}"), frame(b"{}") * 2, frame(b"{}", 5), frame(b"\xff")):
                got = await call(client, path, CONNECT, sent)
                assert got.status_code == 200, path
                ended = json.loads(frames(got.content)[0][1])
                assert ended["error"]["code"] == "unauthenticated"
                got = await call(client, path, WEB, sent)
                assert trailers(frames(got.content)[0][1])["grpc-status"] == "16"
        key = {"authorization": "Bearer secret-of-alice-that-is-long"}
        good = await call(client, UNARY, JSON, b'{"text": "abc"}', **key)
        assert good.json() == {"tokenIds": [0, 1, 2]}


async def test_a_method_that_is_not_there(client: httpx.AsyncClient) -> None:
    path = f"/{SERVICE}/Nothing"
    got = await call(client, path, JSON, b"{}")
    assert (got.status_code, got.json()["code"]) == (501, "unimplemented")
    assert f"no method {SERVICE}/Nothing" in got.json()["message"]
    ((_, end),) = frames((await call(client, path, WEB, frame(b""))).content)
    assert trailers(end)["grpc-status"] == "12"


@pytest.mark.parametrize(
    ("path", "content_type", "status", "header"),
    [
        (UNARY, CONNECT, 415, "accept-post"),
        (STREAM, JSON, 415, "accept-post"),
        (UNARY, "text/plain", 415, "accept-post"),
        (UNARY, "application/x-www-form-urlencoded", 415, "accept-post"),
    ],
)
async def test_a_content_type_that_does_not_fit(
    client: httpx.AsyncClient, path: str, content_type: str, status: int, header: str
) -> None:
    got = await call(client, path, content_type, b"{}")
    assert (got.status_code, got.content) == (status, b"")
    assert ("application/proto" in got.headers[header]) is (path == UNARY)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "isn't a JSON object"),
        (b"[]", "isn't a JSON object"),
        (b"\xff", "aren't UTF-8"),
        (b'{"text": ', "Expecting value"),
        (b'{"text": "a", "text": "b"}', "two fields of one name"),
        (b'{"text": ["a"]}', "text field"),
        (b'{"conversation": {"messages": {}}}', "must be in []"),
        (b'{"conversation": 1}', "conversation"),
        (b'{"text": 1}', "text field"),
        (b'{"txt": "a"}', 'no field named "txt"'),
        (b'{"text": ' * 5000, "recursion"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
async def test_json_that_is_no_request(client: httpx.AsyncClient, body: bytes, why: str) -> None:
    got = await call(client, UNARY, JSON, body)
    assert (got.status_code, got.json()["code"]) == (400, "invalid_argument")
    assert why in got.json()["message"]


MANGLED = [
    (WEB, b"\0\0", "13"),
    (WEB, frame(asked("one"))[:-1], "13"),
    (WEB, frame(asked("one"), 0x80), "13"),
    (WEB, frame(asked("one"), 1), "13"),
    (WEB, b"\0\x7f\xff\xff\xff", "8"),
    (WEB, frame(asked("one")) * 2, "13"),
    (WEB, frame(b"\xff\xff"), "13"),
    (WEB, b"", "12"),
    (TEXT, b"AAA!", "13"),
    (TEXT, b"AA=A", "13"),
    (TEXT, base64.b64encode(frame(asked("one")))[:-1], "13"),
    (CONNECT, frame(b"{}", 2), "invalid_argument"),
    (CONNECT, frame(b"\xff\xff"), "invalid_argument"),
    (CONNECT_JSON, frame(b"{"), "invalid_argument"),
]


@pytest.mark.parametrize(("content_type", "body", "code"), MANGLED)
async def test_frames_that_are_malformed(
    client: httpx.AsyncClient, content_type: str, body: bytes, code: str
) -> None:
    got = await call(client, STREAM, content_type, body)
    content = from_base64(got.content) if content_type == TEXT else got.content
    ((flags, end),) = frames(content)
    if content_type in (CONNECT, CONNECT_JSON):
        assert (flags, json.loads(end)["error"]["code"]) == (2, code)
    else:
        assert (flags, trailers(end)["grpc-status"]) == (0x80, code)


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        (PROTO, b"x" * ((1 << 20) + 1), 429),
        (PROTO, b"\xff\xff", 400),
        (JSON, b'{"text": "' + b"x" * (1 << 20) + b'"}', 429),
    ],
)
async def test_unary_messages_that_cannot_be_taken(
    client: httpx.AsyncClient, content_type: str, body: bytes, status: int
) -> None:
    got = await call(client, UNARY, content_type, body)
    assert (got.status_code, got.headers["content-type"]) == (status, JSON)


async def test_a_unary_message_that_cannot_be_unpacked(client: httpx.AsyncClient) -> None:
    got = await call(client, UNARY, PROTO, b"no gzip", content_encoding="gzip")
    assert (got.status_code, got.json()["code"]) == (400, "invalid_argument")
    assert "can't be unpacked" in got.json()["message"]
    bomb = gzip.compress(bytes(2 << 20))
    assert (await call(client, UNARY, PROTO, bomb, content_encoding="gzip")).status_code == 429


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"connect-timeout-ms": "1s"}, "invalid_argument"),
        ({"connect-timeout-ms": "12345678901"}, "invalid_argument"),
        ({"connect-protocol-version": "2"}, "invalid_argument"),
        ({"x-own-bin": "!"}, "invalid_argument"),
        ({"grpc-timeout": "1 s"}, "internal"),
    ],
)
async def test_headers_that_are_malformed(
    client: httpx.AsyncClient, headers: dict[str, str], code: str
) -> None:
    got = await call(client, UNARY, JSON, b'{"text": "abc"}', **headers)
    assert got.json()["code"] == code
    assert next(iter(headers)) in got.json()["message"]
    web = await call(client, STREAM, WEB, frame(asked("one")), **headers)
    said = trailers(frames(web.content)[0][1])
    assert said["grpc-status"] == ("13" if code == "internal" else "3")


async def test_headers_that_are_too_many_are_refused_unread(service: WebService) -> None:
    async with connected(service.port) as wire:
        fields = request_fields(UNARY, content_type=JSON, te=None)
        rpc = wire.rpc(fields=[*fields, ("", ""), ("x-long", "x" * 20_000)], end=True)
        assert (await rpc.headers())[":status"] == "429"
        await wire.until(lambda: b"metadata of " in rpc.received)
        await wire.answered()
