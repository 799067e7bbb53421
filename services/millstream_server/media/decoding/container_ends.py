"""Whether a video file's end is missing, from the sizes that its container states.

Decoders read a truncated file up to where it ends and report nothing.
"""

from __future__ import annotations

from millstream_server.media.sniff import MediaFormat

_BOX_HEADER = 8
_LARGE_BOX_HEADER = 16
_MAX_BOXES = 1000


def is_cut_off(data: memoryview, media_format: MediaFormat) -> bool:
    """Return whether the file is shorter than it says."""
    return _mp4(data) if media_format is MediaFormat.MP4 else _matroska(data)


def _mp4(data: memoryview) -> bool:
    """Walk the boxes of the outermost level (ISO/IEC 14496-12, 4.2)."""
    at = 0
    for _ in range(_MAX_BOXES):
        if at + _BOX_HEADER > len(data):
            return False  # junk of less than a header after the last box does no harm
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 0:  # up to the end of the file
            return False
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + _LARGE_BOX_HEADER], "big")
        if size < _BOX_HEADER:
            return True
        at += size
        if at > len(data):
            return True
    return False


def _matroska(data: memoryview) -> bool:
    """Compare the segment's size, which follows the EBML header (RFC 8794, RFC 9559)."""
    header_size, at = _vint(data, 4)
    if header_size is None:
        return True
    segment = at + header_size
    size, at = _vint(data, segment + 4)
    if size is None:  # unknown, as live recorders write
        return at > len(data)
    return at + size > len(data)


def _vint(data: memoryview, at: int) -> tuple[int | None, int]:
    """Read a variable-size integer; returns it, None if "unknown", and where it ends."""
    if at >= len(data) or data[at] == 0:
        return None, len(data) + 1
    length = 9 - data[at].bit_length()
    value = int.from_bytes(data[at : at + length], "big") & ((1 << 7 * length) - 1)
    return None if value == (1 << 7 * length) - 1 else value, at + length
