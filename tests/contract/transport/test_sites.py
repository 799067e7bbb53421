"""Which pages may call, and for which hosts: at every door of HTTP, by both versions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.wire.http_service import http_service
from tests.support.wire.raw_http2 import connected, request_fields
from tests.support.wire.web_service import (
    CONNECT,
    CONNECT_JSON,
    JSON,
    OPTIONS,
    PROTO,
    STREAM,
    TEXT,
    UNARY,
    WEB,
    Version,
    asked,
    caller,
    web_service,
)

PAGE, OTHER = "https://app.example", "https://other.example"
FORM = "multipart/form-data; boundary=x"
Doors = list[tuple[str, str, str]]
RPCS: Doors = [
    ("POST", UNARY, JSON),
    ("POST", UNARY, PROTO),
    ("POST", UNARY, "text/plain"),
    ("POST", STREAM, CONNECT),
    ("POST", STREAM, CONNECT_JSON),
    ("POST", STREAM, WEB),
    ("POST", STREAM, TEXT),
]
ENDPOINTS: Doors = [
    ("POST", "/echo", "text/plain"),
    ("POST", "/echo", JSON),
    ("POST", "/echo", FORM),
    ("POST", "/busy", JSON),
    ("POST", "/none", JSON),
    ("GET", "/none", ""),
    ("OPTIONS", "/echo", ""),
    ("PUT", "/", ""),
]
OPEN: Doors = [("GET", "/", ""), ("GET", "/livez", ""), ("HEAD", "/readyz", "")]


@pytest.mark.parametrize(
    ("headers", "origins", "refused"),
    [
        ({}, (), ""),
        ({"sec-fetch-site": "none"}, (), ""),
        ({"sec-fetch-site": "same-origin", "origin": OTHER}, (), ""),
        ({"origin": "http://own"}, (), ""),
        ({"sec-fetch-site": "same-site", "origin": "https://own"}, (), ""),
        ({"sec-fetch-site": "cross-site", "origin": PAGE}, (PAGE,), ""),
        ({"sec-fetch-site": "cross-site", "origin": "null"}, ("*",), ""),
        ({"sec-fetch-site": "cross-site"}, (PAGE,), "--cors-origins"),
        ({"sec-fetch-site": "same-site"}, (), "--cors-origins"),
        ({"sec-fetch-site": "cross-site", "origin": OTHER}, (PAGE,), "--cors-origins"),
        ({"origin": OTHER}, (), "--cors-origins"),
        ({"origin": "null"}, (PAGE,), "--cors-origins"),
        ({"origin": "http://own:81"}, (), "--cors-origins"),
    ],
)
async def test_pages_of_other_sites_are_refused_at_every_door(
    version: Version, headers: dict[str, str], origins: tuple[str, ...], refused: str
) -> None:
    options = replace(OPTIONS, cors_origins=origins)
    async with web_service(options) as rpcs, http_service(options) as endpoints:
        for port, doors in ((rpcs.port, RPCS), (endpoints.port, ENDPOINTS)):
            async with caller(port, version) as client:
                for verb, path, kind in doors:
                    sent = {"host": "own", "content-type": kind, **headers}
                    got = await client.request(verb, path, content=b"{}", headers=sent)
                    assert (got.status_code == 403) is bool(refused), (verb, path, kind)
                    assert refused in got.text
        async with caller(endpoints.port, version) as client:
            for verb, path, _ in OPEN:
                assert (await client.request(verb, path, headers=headers)).status_code != 403
    assert bool(rpcs.metadata) is not bool(refused)
    assert endpoints.bodies == [b"{}"] * (0 if refused else 3)


@pytest.mark.parametrize(
    ("host", "hosts", "refused"),
    [
        ("localhost", (), ""),
        ("LOCALHOST:50051", (), ""),
        ("127.0.0.1:50051", (), ""),
        ("127.1.2.3", (), ""),
        ("[::1]:50051", (), ""),
        ("app.example:50051", ("app.example",), ""),
        ("[fd00::2]:50051", ("[fd00::2]",), ""),
        ("evil.example", ("*",), ""),
        ("evil.example", None, ""),
        ("evil.example", (), "--hosts"),
        ("evil.example:50051", ("app.example",), "--hosts"),
        ("localhost.evil.example", (), "--hosts"),
        ("127.0.0.1.evil.example", (), "--hosts"),
        ("192.0.2.1", (), "--hosts"),
    ],
)
async def test_on_loopback_only_requests_for_known_hosts_are_served(
    version: Version, host: str, hosts: tuple[str, ...] | None, refused: str
) -> None:
    options = replace(OPTIONS, hosts=hosts)
    async with web_service(options) as rpcs, http_service(options) as endpoints:
        for port, doors in ((rpcs.port, RPCS), (endpoints.port, ENDPOINTS)):
            async with caller(port, version) as client:
                for verb, path, kind in doors:
                    sent = {"host": host, "content-type": kind, "sec-fetch-site": "same-origin"}
                    got = await client.request(verb, path, content=b"{}", headers=sent)
                    assert (got.status_code == 403) is bool(refused), (verb, path, kind)
                    assert refused in got.text
        async with caller(endpoints.port, version) as client:
            for verb, path, _ in OPEN:
                got = await client.request(verb, path, headers={"host": host})
                assert got.status_code != 403
    assert bool(rpcs.metadata) is not bool(refused)


async def test_grpc_is_not_asked_for_a_page() -> None:
    options = replace(OPTIONS, hosts=())
    async with web_service(options) as service, connected(service.port) as wire:
        fields = [*request_fields(STREAM), ("origin", OTHER), ("sec-fetch-site", "cross-site")]
        fields = [(n, "evil.example" if n == ":authority" else v) for n, v in fields]
        rpc = wire.rpc(fields=fields)
        rpc.send(asked("one"), end=True)
        assert await rpc.code() == 0


async def test_the_page_may_be_asked_for_by_head() -> None:
    options = replace(OPTIONS, hosts=())
    async with http_service(options) as service, caller(service.port, "1.1") as client:
        got = await client.head("/", headers={"host": "evil.example", "origin": OTHER})
        assert got.status_code == 404  # there is none here
        assert (await client.head("/none", headers={"origin": OTHER})).status_code == 403
