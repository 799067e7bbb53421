"""Formats by their first bytes."""

from __future__ import annotations

import io
import re

import pytest
from PIL import Image

from millstream_server.media.items import Modality
from millstream_server.media.sniff import MediaFormat, check_media
from millstream_server.runtime.errors import InvalidRequestError
from tests.support.media.media_files import saved, solid, video

FTYP = b"\0\0\0\x18ftyp"


def _refusal(data: bytes, modality: Modality = Modality.IMAGE) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        check_media(data, modality, "messages[0].content[1].image")
    (violation,) = refused.value.violations
    assert violation.field == "messages[0].content[1].image"
    return violation.description


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF"])
def test_accepted_images(name: str) -> None:
    assert check_media(solid(name), Modality.IMAGE) is MediaFormat[name]
    assert check_media(memoryview(solid(name)), Modality.IMAGE) is MediaFormat[name]


@pytest.mark.parametrize(
    ("container", "codec", "found"),
    [
        ("mp4", "libx264", MediaFormat.MP4),
        ("mov", "libx264", MediaFormat.MP4),
        ("webm", "libvpx", MediaFormat.WEBM),
        ("matroska", "libx264", MediaFormat.WEBM),
    ],
)
def test_accepted_videos(container: str, codec: str, found: MediaFormat) -> None:
    data = video(2, container=container, codec=codec)
    assert check_media(data, Modality.VIDEO) is found


def test_old_quicktime_without_a_brand() -> None:
    data = b"\0\0\0\x08wide\0\0\0\x10mdat"
    assert check_media(data, Modality.VIDEO) is MediaFormat.MP4


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<svg xmlns='x'/>", "an SVG"),
        (b"\xef\xbb\xbf\n<?xml version='1.0'?><!-- x --><svg>", "an SVG"),
        (b"<?xml version='1.0'?><feed/>", "XML"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"%PDF-1.7\n", "a PDF"),
        (FTYP + b"heic", "a HEIC"),
        (FTYP + b"avif", "an AVIF"),
        (FTYP + b"M4A ", "an audio file"),
        (b"\0\0\0\x0cjP  \r\n", "a JPEG 2000"),
        (b"RIFF\x10\0\0\0AVI LIST", "an AVI"),
        (b"RIFF\x10\0\0\0WAVEfmt ", "a WAV"),
        (b"#EXTM3U\nfile:///etc/passwd", "a playlist"),
        (b"hello, world \xc3\xa4", "text"),
        (b"\x01\x02\x03\x04", "of an unknown format"),
        (b"\x1a\x45\xdf\xa3" + bytes(60), "an EBML file of an unknown kind"),
        (b"", "empty"),
    ],
)
def test_others_are_named(data: bytes, name: str) -> None:
    assert _refusal(data) == f"is {name}; PNG, JPEG, WebP and GIF are accepted"


@pytest.mark.parametrize(
    ("name", "shown"),
    [("TIFF", "a TIFF"), ("BMP", "a BMP"), ("ICO", "an ICO"), ("AVIF", "an AVIF")],
)
def test_what_pillow_could_read_too(name: str, shown: str) -> None:
    data = saved(Image.new("RGB", (16, 16)), name)
    assert Image.open(io.BytesIO(data)).size == (16, 16)
    assert _refusal(data) == f"is {shown}; PNG, JPEG, WebP and GIF are accepted"


def test_a_long_text_whose_head_ends_inside_a_character() -> None:
    for shift in range(4):
        assert _refusal(b"a" * shift + "€".encode() * 1000).startswith("is text;")


def test_the_other_modality_is_named() -> None:
    assert _refusal(video(2)) == (
        "is an MP4, which is a video; an image was expected: PNG, JPEG, WebP and GIF are accepted"
    )
    assert re.fullmatch(
        r"is a PNG, which is an image; a video was expected: MP4, .* are accepted",
        _refusal(solid(), Modality.VIDEO),
    )
