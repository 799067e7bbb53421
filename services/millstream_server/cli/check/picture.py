"""A small picture, made without an image library."""

from __future__ import annotations

import struct
import zlib

_SIZE = 64
"""Pixels of a side: more than any vision model's least, and few tokens."""
_RED = b"\xff\x00\x00"


def small_png() -> bytes:
    """Return a red square as a PNG file."""
    header = struct.pack(">IIBBBBB", _SIZE, _SIZE, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    rows = (b"\x00" + _RED * _SIZE) * _SIZE  # each begins with its filter, none
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum
