"""The page at `/` without a browser: what it may load, who gets it, and that it can be off."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import suite
from tests.support.processor.another_port import another
from tests.support.wire.http_service import raw


@pytest.fixture
def model(tmp_path: Path) -> TextModel:
    return TextModel.load(alphabet_model(tmp_path / "model"))


async def get(port: int, path: str) -> tuple[int, dict[str, str], bytes]:
    async with raw(port) as wire:
        wire.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        status, headers, parts = await wire.response()
    return status, headers, b"".join(parts)


async def test_it_may_run_its_own_script_and_load_nothing(model: TextModel) -> None:
    async with suite(model) as (front, _):
        status, headers, page = await get(front.port, "/?from=a-link")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    for element in (b"script", b"style"):
        (content,) = re.findall(b"<%b>(.*?)</%b>" % (element, element), page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert f"{element.decode()}-src 'sha256-{digest}'" in policy
    assert b"//" not in re.sub(rb"// .*$", b"", page, flags=re.MULTILINE)  # comments, no URL


async def test_it_comes_without_a_key_and_nothing_else_does(model: TextModel) -> None:
    keys = AuthPolicy(keys=ApiKeys(inline=f"alice:{'k' * 32}"))
    async with suite(model) as (front, _), another(front, auth=keys) as port:
        assert (await get(port, "/"))[0] == 200
        assert (await get(port, "/v1/models"))[0] == 401
        assert (await get(port, "/openapi.json"))[0] == 401


async def test_it_can_be_off(model: TextModel) -> None:
    async with suite(model) as (front, _), another(front, page=False) as port:
        assert (await get(port, "/"))[0] == 404
        status, _, document = await get(port, "/openapi.json")
        assert status == 200
        assert b'"/":' not in document
