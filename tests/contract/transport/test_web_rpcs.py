"""gRPC-web and Connect on the public port: the bytes of calls, on both versions of HTTP."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from millstream.v1 import processor_pb2
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_testing.waiting import until
from tests.support.wire.http_service import post, raw
from tests.support.wire.raw_http2 import Setting, connected, request_fields, settings, window_update
from tests.support.wire.web_service import (
    BIDI,
    SERVICE,
    STREAM,
    UNARY,
    Version,
    WebService,
    caller,
    frame,
    frames,
    from_base64,
    texts,
    trailers,
    web_service,
)

PROTO, JSON = "application/proto", "application/json"
WEB, TEXT = "application/grpc-web+proto", "application/grpc-web-text+proto"
CONNECT, CONNECT_JSON = "application/connect+proto", "application/connect+json"
ABC = processor_pb2.TokenizeRequest(text="abc").SerializeToString()


@pytest_asyncio.fixture
async def service() -> AsyncIterator[WebService]:
    async with web_service() as served:
        yield served


@pytest.fixture(params=["1.1", "2"])
def version(request: pytest.FixtureRequest) -> Version:
    found: Version = request.param
    return found


@pytest_asyncio.fixture
async def client(service: WebService, version: Version) -> AsyncIterator[httpx.AsyncClient]:
    """Call by a version of HTTP; afterwards nothing is held, and the same client is served."""
    async with caller(service.port, version) as opened:
        yield opened
        again = await call(opened, UNARY, JSON, b'{"text": "abc"}')
        assert (again.status_code, again.json()) == (200, {"tokenIds": [0, 1, 2]})
    await until(lambda: not service.server.connections)
    bounds = service.server.bounds
    assert bounds.streams.used == bounds.silent.used == 0
    assert bounds.received.used == bounds.unsent.used == 0


async def call(
    client: httpx.AsyncClient, path: str, content_type: str, body: bytes, **headers: str
) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.post(path, content=body, headers={"content-type": content_type, **named})


def asked(text: str) -> bytes:
    return processor_pb2.CompleteRequest(text=text).SerializeToString()


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
        web = await call(client, STREAM, WEB, frame(b"\xff"))
        assert trailers(frames(web.content)[0][1])["grpc-status"] == "16"
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


async def test_rpcs_are_post(client: httpx.AsyncClient) -> None:
    got = await client.get(UNARY)
    assert (got.status_code, got.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "isn't a JSON object"),
        (b"[]", "isn't a JSON object"),
        (b"\xff", "aren't UTF-8"),
        (b'{"text": ', "Failed to load JSON"),
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
    (CONNECT, frame(b"{}", 2), "internal"),
    (CONNECT, frame(b"\xff\xff"), "internal"),
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
        (PROTO, b"\xff\xff", 500),
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
    assert "can't be unpacked" in got.json()["message"]
    bomb = gzip.compress(bytes(2 << 20))
    assert (await call(client, UNARY, PROTO, bomb, content_encoding="gzip")).status_code == 429


@pytest.mark.parametrize(
    "headers",
    [
        {"connect-timeout-ms": "1s"},
        {"connect-timeout-ms": "12345678901"},
        {"connect-protocol-version": "2"},
    ],
)
async def test_headers_that_are_malformed(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    got = await call(client, UNARY, JSON, b'{"text": "abc"}', **headers)
    assert (got.status_code, got.json()["code"]) == (400, "invalid_argument")
    assert next(iter(headers)) in got.json()["message"]


# ---- cancel and deadline -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content_type", "body"),
    [
        (UNARY, JSON, b'{"text": "hang"}'),
        (STREAM, CONNECT, frame(asked("hang"))),
        (STREAM, WEB, frame(asked("hang"))),
    ],
)
async def test_a_deadline_ends_the_handler(
    service: WebService, client: httpx.AsyncClient, path: str, content_type: str, body: bytes
) -> None:
    name = "grpc_timeout" if content_type == WEB else "connect_timeout_ms"
    within = "50m" if content_type == WEB else "50"
    got = await call(client, path, content_type, body, **{name: within})
    await until(lambda: service.cancelled == 1)
    if content_type == WEB:
        assert trailers(frames(got.content)[0][1])["grpc-status"] == "4"
    else:
        assert b"deadline_exceeded" in got.content
    assert got.status_code == (504 if path == UNARY else 200)


async def test_a_caller_that_leaves_cancels_its_rpc(service: WebService) -> None:
    body = frame(asked("hang"))
    async with raw(service.port) as http1:
        http1.send(post(STREAM, body, headers=f"Content-Type: {CONNECT}\r\n"))
        await until(lambda: service.waiting == 1)
    await until(lambda: service.cancelled == 1)
    async with connected(service.port) as wire:
        rpc = wire.rpc(fields=request_fields(STREAM, content_type=WEB, te=None))
        rpc.send_raw(body, end=True)
        await until(lambda: service.waiting == 2)
        rpc.reset()
        await until(lambda: service.cancelled == 2)


async def test_http_1_0_and_a_pipeline(service: WebService) -> None:
    head = "Content-Type: application/json\r\n"
    request = post(UNARY, b'{"text": "abc"}', headers=head)
    async with raw(service.port) as wire:
        wire.send(request * 2)
        assert [(await wire.response())[2] for _ in range(2)] == [[b'{"tokenIds": [0, 1, 2]}']] * 2
    async with raw(service.port) as wire:
        body = frame(asked("one two"))
        wire.send(post(STREAM, body, headers=f"Content-Type: {WEB}\r\n", version="1.0"))
        status, headers, (got,) = await wire.response()
        assert (status, headers["connection"], len(frames(got))) == (200, "close", 3)
