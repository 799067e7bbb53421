"""Small images and videos made on the spot, and files with a lie in their header."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import struct
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image

VIDEO_STEP = 2
"""How much brighter each frame of `video` is than the one before."""


def saved(image: Image.Image, media_format: str, **options: Any) -> bytes:
    """Return an image's file."""
    buffer = io.BytesIO()
    image.save(buffer, media_format, **options)
    return buffer.getvalue()


def solid(media_format: str = "PNG", size: tuple[int, int] = (8, 4), color: str = "red") -> bytes:
    """Return a file of one colour."""
    return saved(Image.new("RGB", size, color), media_format)


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and has hardly any pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = _chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + pixels + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def video(
    frames: int = 12,
    *,
    size: tuple[int, int] = (64, 48),
    rate: int = 4,
    codec: str = "libx264",
    container: str = "mp4",
    rotation: int = 0,
    audio: bool = False,
    fragmented: bool = False,
    drawn: np.ndarray | None = None,
    **codec_options: str,
) -> bytes:
    """Return a video whose n-th frame is grey of ``VIDEO_STEP`` * n, its top left corner red.

    Or its frames are those of ``drawn``: [frames, height, width, 3] bytes.
    """
    pictures = [_frame(index, size) for index in range(frames)]
    if drawn is not None:
        pictures = [av.VideoFrame.from_ndarray(picture, format="rgb24") for picture in drawn]
        size = (drawn.shape[2], drawn.shape[1])
    buffer = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov"} if fragmented else {}
    with _own_priority(), av.open(buffer, "w", format=container, options=options) as output:
        stream: Any = output.add_stream(codec, rate=rate, options=codec_options)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        speech: Any = output.add_stream("aac", rate=16_000) if audio else None
        for picture in pictures:
            output.mux(stream.encode(picture))
        output.mux(stream.encode())
        if audio:
            _mux_silence(output, speech)
    return buffer.getvalue()


@contextlib.contextmanager
def _own_priority() -> Iterator[None]:
    """Keep this thread's priority: SVT-AV1 makes the thread that uses it a real-time one.

    Every later test and process would inherit that, and those that spin would starve all others.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)


def sound() -> bytes:
    """Return a Matroska file without a video."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        _mux_silence(output, output.add_stream("aac", rate=16_000))
    return buffer.getvalue()


def _mux_silence(output: Any, stream: Any) -> None:
    silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
    silence.sample_rate = 16_000
    output.mux(stream.encode(silence))
    output.mux(stream.encode())


def _frame(index: int, size: tuple[int, int]) -> Any:
    width, height = size
    pixels = np.full((height, width, 3), index * VIDEO_STEP % 256, np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    return av.VideoFrame.from_ndarray(pixels, format="rgb24")


def sha256(data: bytes) -> bytes:
    """Return a file's SHA-256."""
    return hashlib.sha256(data).digest()


def rows(color: tuple[int, int, int], cells: int, width: int) -> bytes:
    """Return what the simulated encoder makes of a picture of one colour."""
    values = [(*color, index, *([0] * (width - 4))) for index in range(cells)]
    return np.array(values, dtype="<f4").tobytes()


def repeated_frame(frames: int, container: str = "mp4", rate: int = 1000) -> bytes:
    """Return a video of many frames, cheaply: one is encoded, and written again and again."""
    encoder: Any = av.CodecContext.create("mpeg4" if container == "mp4" else "libvpx", "w")
    encoder.width, encoder.height, encoder.pix_fmt = 16, 16, "yuv420p"
    encoder.time_base = Fraction(1, rate)
    packets: list[Any] = encoder.encode(_frame(0, (16, 16))) + encoder.encode()
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream("mpeg4" if container == "mp4" else "libvpx", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        again = bytes(packets[0])
        for index in range(frames):
            copy = av.Packet(again)
            copy.stream, copy.time_base = stream, Fraction(1, rate)
            copy.pts = copy.dts = index
            copy.duration, copy.is_keyframe = 1, True
            output.mux(copy)
    return buffer.getvalue()


def noise(size: tuple[int, int]) -> bytes:
    """Return a PNG that can't be compressed: about width x height x 3 bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return saved(Image.fromarray(pixels), "PNG", compress_level=1)


def comment(text: str) -> bytes:
    """Return what makes another file of the same picture, `before_end` and then this."""
    return _chunk(b"tEXt", b"Comment\0" + text.encode()) + _chunk(b"IEND", b"")


def before_end(png: bytes) -> bytes:
    """Return a PNG without its end."""
    return png[: png.rindex(b"IEND") - 4]
