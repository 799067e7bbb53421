"""What a decoder process is sent and returns: fixed headers, then raw bytes. Nothing is pickled.

A request is a header and the file. A response is a header, then the indices of the frames and
their pixels, or a sentence. The process has read an untrusted file, so the pool checks what it
returns.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Self

from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.items import MediaLimits, Modality
from millstream_server.media.sniff import MediaFormat


class Refusal(Exception):  # noqa: N818 - not an error of the decoder
    """The file can't be accepted; the text is for the caller, without the field's name."""


def damaged(media_format: MediaFormat) -> Refusal:
    """Refuse what the vendor's decoder fails at; its own text may quote the file."""
    return Refusal(f"is truncated or damaged: it can't be decoded as {media_format.value}")


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Refuse too many pixels, before any of them is decoded.

    Raises:
        Refusal: there are too many, or none.
    """
    width, height = size
    if width < 1 or height < 1:
        raise Refusal(f"is {width} x {height} pixels; at least 1 x 1 is needed")
    if width * height > max_pixels:
        raise Refusal(
            f"is {width} x {height} = {width * height} pixels; {max_pixels} are allowed: "
            "send a smaller one"
        )


_REQUEST = struct.Struct("<BBQIIdQddQII")
_RESPONSE = struct.Struct("<BIIIIdQ")
REQUEST_BYTES = _REQUEST.size
RESPONSE_BYTES = _RESPONSE.size
READY = b"R"
"""What a process sends once, when it has limited itself and can be sent requests."""
MAX_SENTENCE_BYTES = 2000
RGB = 3
DECODER_THREADS = 2
"""Threads that decode a video; bounds processor time."""
_SENT_LIMITS = (
    "max_pixels",
    "max_frames",
    "max_video_frames",
    "max_video_s",
    "max_decoded_bytes",
    "fps",
    "decode_timeout_s",
)
"""In `_REQUEST`'s order."""
_FORMATS = tuple(MediaFormat)
_SAMPLINGS = tuple(FrameSampling)


class DecodingOutcome(enum.IntEnum):
    """What a response is."""

    DECODED = 0
    REFUSED = 1
    """With a sentence for the caller."""
    OUT_OF_MEMORY = 2
    FAILED = 3
    """A bug or a missing package, with a text for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRequest:
    """A file to be decoded, without its bytes."""

    media_format: MediaFormat
    sampling: FrameSampling
    limits: MediaLimits
    nbytes: int
    fit: tuple[int, int] | None = None
    """Images: width and height that the picture is scaled to; what is too much on two of its sides
    is cut off, the same on both. None: it keeps its size."""

    def pack(self) -> bytes:
        return _REQUEST.pack(
            _FORMATS.index(self.media_format),
            _SAMPLINGS.index(self.sampling),
            *(getattr(self.limits, name) for name in _SENT_LIMITS),
            self.nbytes,
            *(self.fit or (0, 0)),
        )

    @classmethod
    def unpack(cls, header: bytes) -> Self:
        """Read a header, which comes from the pool; limits that aren't sent have defaults."""
        media_format, sampling, *limits, nbytes, width, height = _REQUEST.unpack(header)
        return cls(
            media_format=_FORMATS[media_format],
            sampling=_SAMPLINGS[sampling],
            limits=MediaLimits(**dict(zip(_SENT_LIMITS, limits, strict=True))),
            nbytes=nbytes,
            fit=(width, height) if width else None,
        )

    @property
    def modality(self) -> Modality:
        return self.media_format.modality


@dataclass(frozen=True, slots=True)
class DecodingResponse:
    """What became of a file, without the bytes that follow; fields in `_RESPONSE`'s order."""

    outcome: DecodingOutcome
    width: int = 0
    height: int = 0
    count: int = 0
    total_frames: int = 0
    fps: float = 0.0
    nbytes: int = 0
    """Of what follows the indices: pixels or a sentence."""

    def pack(self) -> bytes:
        return _RESPONSE.pack(*astuple(self))

    @classmethod
    def unpack(cls, header: bytes, request: DecodingRequest) -> Self:
        """Read and check a header.

        Raises:
            ValueError: it can't be a response to ``request``.
        """
        outcome, width, height, count, total, fps, nbytes = _RESPONSE.unpack(header)
        response = cls(DecodingOutcome(outcome), width, height, count, total, fps, nbytes)
        if response.outcome is DecodingOutcome.DECODED:
            limits = request.limits
            in_limits = nbytes <= limits.max_decoded_bytes and count <= max(1, limits.max_frames)
            as_asked = request.fit in (None, (width, height))
            is_whole = nbytes == width * height * count * RGB and nbytes > 0
            if not (is_whole and in_limits and as_asked):
                raise ValueError("a decoder process returned a size that can't be")
        elif count or nbytes > MAX_SENTENCE_BYTES:
            raise ValueError("a decoder process returned too long a sentence")
        return response


@dataclass(frozen=True, slots=True)
class Reply:
    """A response with what follows its header."""

    response: DecodingResponse
    indices: tuple[int, ...]
    parts: Sequence[bytes | memoryview]
    """The frames one after the other, or a sentence; ``response.nbytes`` together."""


def pack_indices(indices: Sequence[int]) -> bytes:
    """Return the frames' indices as bytes."""
    return struct.pack(f"<{len(indices)}I", *indices)


def unpack_indices(data: bytes) -> tuple[int, ...]:
    """Read what `pack_indices` made."""
    return struct.unpack(f"<{len(data) // 4}I", data)
