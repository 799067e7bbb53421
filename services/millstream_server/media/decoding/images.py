"""Decodes images with Pillow; runs in a decoder process."""

from __future__ import annotations

import io
import warnings
from typing import Any

from PIL import Image, ImageOps

from millstream_server.media.decoding.wire import (
    DecodingOutcome,
    DecodingRequest,
    DecodingResponse,
    Refusal,
    Reply,
    check_size,
    damaged,
)

# Our own limit is checked on the header; Pillow's is one number for the process.
Image.MAX_IMAGE_PIXELS = None
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_WEBP_HEAD = 30


def decode_image(data: memoryview, request: DecodingRequest) -> Reply:
    """Decode an image's first frame, upright.

    Raises:
        Refusal: it is too large or damaged.
    """
    max_pixels = request.limits.max_pixels
    if request.media_format.name == "WEBP":
        # Pillow makes the decoder, with memory for the canvas, already when it opens a WebP.
        check_size(_webp_size(data[:_WEBP_HEAD], request), max_pixels)
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(data), formats=(request.media_format.name,))
            check_size(image.size, max_pixels)
            image.load()
            check_size(image.size, max_pixels)
            image = _fitted(_rgb(_upright(image)), request)
    except (Refusal, MemoryError):
        raise
    except Exception as error:  # the vendor's code raises errors of many kinds on damaged files
        raise damaged(request.media_format) from error
    pixels = image.tobytes()
    width, height = image.size
    response = DecodingResponse(
        outcome=DecodingOutcome.DECODED,
        width=width,
        height=height,
        count=1,
        total_frames=1,
        nbytes=len(pixels),
    )
    return Reply(response, (0,), (pixels,))


def _upright(image: Any) -> Any:
    """Apply the camera's orientation; models are shown pictures as people see them."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001 - the vendor's code; damaged EXIF data do no harm to pixels
        return image
    transpose = _UPRIGHT.get(orientation)
    return image if transpose is None else image.transpose(transpose)


def _fitted(image: Any, request: DecodingRequest) -> Any:
    """Scale to `DecodingRequest.fit`; nothing is stretched, the middle of the picture is kept."""
    if request.fit is None or image.size == request.fit:
        return image
    return ImageOps.fit(image, request.fit, Image.Resampling.LANCZOS)


def _rgb(image: Any) -> Any:
    """Convert to RGB as the models' own processors do, in transformers: `convert("RGB")`.

    That drops an alpha channel and shows the colours stored under it; compositing would give the
    model other pixels than it gets from transformers. Only 16-bit grey is scaled instead: there
    `convert` clips all above 255, which makes nearly all of a picture white.
    """
    if image.mode.startswith("I"):
        # I;16, or I (32 bits), which PNG uses for 16-bit grey too.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


def _webp_size(head: memoryview, request: DecodingRequest) -> tuple[int, int]:
    """Read width and height from a WebP's first chunk (RFC 9649)."""
    if len(head) < _WEBP_HEAD:
        raise damaged(request.media_format)
    match bytes(head[12:16]):
        case b"VP8X":
            return 1 + _little(head[24:27]), 1 + _little(head[27:30])
        case b"VP8L":
            bits = _little(head[21:25])
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            return _little(head[26:28]) & 0x3FFF, _little(head[28:30]) & 0x3FFF
        case _:
            raise damaged(request.media_format)


def _little(data: memoryview) -> int:
    return int.from_bytes(data, "little")
