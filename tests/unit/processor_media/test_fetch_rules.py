"""Which addresses a client's URL may lead to, and media inside a URL."""

from __future__ import annotations

import base64

import pytest

from millstream_server.processor.media.urls import decode_data_url, is_public
from millstream_server.runtime.errors import InvalidRequestError


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "93.184.215.14", "2606:4700:4700::1111", "64:ff9b::808:808"],
)
def test_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",  # noqa: S104 - refused, not bound
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "127.8.8.8",
        "169.254.169.254",
        "172.16.0.1",
        "192.0.0.9",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:0:8.8.8.8",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "64:ff9b::127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::8.8.8.8",
        "2001::1",
        "2001:db8::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%1",
        "fec0::1",
        "ff02::1",
        "2130706433",
        "127.1",
        "localhost",
        "",
    ],
)
def test_not_public(address: str) -> None:
    assert not is_public(address)


def _url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 1000])
def test_a_data_url(size: int) -> None:
    data = bytes(range(256)) * 4
    assert decode_data_url(_url(data[:size]), "url", size) == data[:size]
    assert decode_data_url(_url(data[:size]).rstrip("="), "url", size) == data[:size]
    assert decode_data_url(_url(data[:size], ""), "url", size) == data[:size]
    assert decode_data_url("DATA" + _url(data[:size])[4:], "url", size) == data[:size]


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (_url(b"12345678"), "has 8 bytes; 7 are allowed"),
        ("data:text/plain,hello", "is a data URL without base64; write data:image/png;base64,..."),
        ("data:;base64", "is a data URL without base64; write data:image/png;base64,..."),
        ("data:" + "x" * 300 + ";base64,aGk=", "is a data URL without base64; write data:image"),
        ("data:image/png;base64,", "is a data URL without data"),
        ("data:image/png;base64,====", "is a data URL whose base64 isn't valid"),
        ("data:image/png;base64,a*b=", "is a data URL whose base64 isn't valid"),
        ("data:image/png;base64,aé", "is a data URL whose base64 isn't valid"),
        ("data:image/png;base64,a", "is a data URL without data"),
    ],
)
def test_refused_data_urls(url: str, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        decode_data_url(url, "messages[0].content[0].url", 7)
    (violation,) = refused.value.violations
    assert violation.field == "messages[0].content[0].url"
    assert violation.description.startswith(sentence)


def test_a_large_one_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(InvalidRequestError, match="has 750 bytes; 749 are allowed"):
        decode_data_url("data:;base64," + "A" * 1000, "url", 749)
