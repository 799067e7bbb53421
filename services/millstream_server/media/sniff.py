"""What a file is, from its first bytes: so that only accepted formats reach a decoder.

Pure Python: the Processor uses it too, before it sends a file to an encode worker.
"""

from __future__ import annotations

import enum
import re
from codecs import getincrementaldecoder

from millstream_server.media.items import Modality
from millstream_server.runtime.errors import InvalidRequestError

HEAD_BYTES = 1024
"""How much of a file's beginning is read."""
_EBML_BYTES = 64
_BOX_TYPE = slice(4, 8)
_BRAND = slice(8, 12)


class MediaFormat(enum.Enum):
    """An accepted format; the values are its names in sentences."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WebP"
    GIF = "GIF"
    MP4 = "MP4"
    WEBM = "WebM"

    @property
    def modality(self) -> Modality:
        """Return what it is decoded to; of an animated image that is its first frame."""
        is_video = self in {MediaFormat.MP4, MediaFormat.WEBM}
        return Modality.VIDEO if is_video else Modality.IMAGE


_ACCEPTED = {
    Modality.IMAGE: "PNG, JPEG, WebP and GIF are accepted",
    Modality.VIDEO: "MP4, MOV, WebM and MKV are accepted",
}
_PREFIXES: tuple[tuple[bytes, MediaFormat | str], ...] = (
    (b"\x89PNG\r\n\x1a\n", MediaFormat.PNG),
    (b"\xff\xd8\xff", MediaFormat.JPEG),
    (b"GIF87a", MediaFormat.GIF),
    (b"GIF89a", MediaFormat.GIF),
    (b"%PDF-", "a PDF"),
    (b"%!PS", "PostScript"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"II+\0", "a TIFF"),
    (b"MM\0+", "a TIFF"),
    (b"BM", "a BMP"),
    (b"8BPS", "a Photoshop file"),
    (b"\0\0\1\0", "an ICO"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL"),
    (b"\xff\x0a", "a JPEG XL"),
    (b"FLV\1", "an FLV"),
    (b"\0\0\1\xba", "an MPEG program stream"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "a WMV or WMA"),
    (b"OggS", "an Ogg file"),
    (b"ID3", "an MP3"),
    (b"fLaC", "a FLAC"),
    (b"PK\3\4", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"#EXTM3U", "a playlist"),
)
_RIFF: dict[bytes, MediaFormat | str] = {
    b"WEBP": MediaFormat.WEBP,
    b"AVI ": "an AVI",
    b"WAVE": "a WAV",
}
_BRANDS: dict[bytes, MediaFormat | str] = {
    **dict.fromkeys((b"avif", b"avis"), "an AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"), "a HEIC"),
    **dict.fromkeys((b"M4A ", b"M4B ", b"M4P "), "an audio file"),
    b"jxl ": "a JPEG XL",
    b"jp2 ": "a JPEG 2000",
    b"crx ": "a camera's raw file",
}
# Files of old QuickTime begin with another box than `ftyp`.
_QUICKTIME = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})


def check_media(data: bytes | memoryview, modality: Modality, field: str = "data") -> MediaFormat:
    """Return the format of a file that should be of ``modality``; ``field`` is its path.

    Raises:
        InvalidRequestError: it is of another modality or of a format that isn't accepted.
    """
    found = _identify(bytes(data[:HEAD_BYTES]))
    accepted = _ACCEPTED[modality]
    if isinstance(found, str):
        raise InvalidRequestError.of(field, f"is {found}; {accepted}")
    if found.modality is not modality:
        raise InvalidRequestError.of(
            field,
            f"is {_with_article(found.value)}, which is {_with_article(found.modality.value)}; "
            f"{_with_article(modality.value)} was expected: {accepted}",
        )
    return found


def _with_article(name: str) -> str:
    return f"an {name}" if name in {"MP4", "image"} else f"a {name}"


def _identify(head: bytes) -> MediaFormat | str:
    """Return the format, or what else it is, with an article."""
    if not head:
        return "empty"
    found = next((found for prefix, found in _PREFIXES if head.startswith(prefix)), None)
    return found or _container(head) or _text(head) or "of an unknown format"


def _container(head: bytes) -> MediaFormat | str | None:
    """Return what is in a container of a known kind, or None."""
    if head.startswith(b"RIFF"):
        return _RIFF.get(head[8:12], "a RIFF file of an unknown kind")
    if head[_BOX_TYPE] == b"ftyp":
        return _BRANDS.get(head[_BRAND], MediaFormat.MP4)
    if head[_BOX_TYPE] in _QUICKTIME:
        return MediaFormat.MP4
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        is_matroska = b"webm" in head[:_EBML_BYTES] or b"matroska" in head[:_EBML_BYTES]
        return MediaFormat.WEBM if is_matroska else "an EBML file of an unknown kind"
    return None


def _text(head: bytes) -> str | None:
    """Return what kind of text it is, or None."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<svg", b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in text:
        return "an SVG"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "HTML"
    if text.startswith(b"<?xml"):
        return "XML"
    if re.search(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]", head):
        return None
    try:
        # The head may end inside a character.
        getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD_BYTES)
    except UnicodeDecodeError:
        return None
    return "text"
