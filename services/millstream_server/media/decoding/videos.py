"""Decodes videos with PyAV; runs in a decoder process.

A file's header may lie about the number of its frames (WebM says 0), and a packet may hold none.
So packets are counted first, which is cheap, then frames while they are decoded; where the two
differ the frames that the model sees are chosen anew and the file is decoded once more.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import av
from av.video.reformatter import VideoReformatter
from PIL import Image

from millstream_server.media.decoding.sampling import sample
from millstream_server.media.decoding.wire import (
    DECODER_THREADS,
    RGB,
    DecodingOutcome,
    DecodingRequest,
    DecodingResponse,
    Refusal,
    Reply,
    check_size,
    damaged,
)
from millstream_server.media.items import MediaLimits
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


Pixels = bytes | memoryview
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm"
_CODECS = ("h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "mpeg4")
# transformers takes this one where a file has none.
_DEFAULT_FPS = 24.0
_UPRIGHT = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known before decoding."""

    width: int
    height: int
    fps: float
    packets: int


def decode_video(data: memoryview, request: DecodingRequest) -> Reply:
    """Decode the frames of a video that the model sees, upright.

    Raises:
        Refusal: it is too large, too long or damaged.
    """
    av.logging.set_level(None)
    if is_cut_off(data, request.media_format):
        raise damaged(request.media_format)
    try:
        facts = _inspect(data, request)
        total = facts.packets
        reply, decoded = _decode(data, request, facts, total)
        if decoded != total:
            reply, _ = _decode(data, request, facts, decoded)
    except (Refusal, MemoryError):
        raise
    except Exception as error:  # the vendor's code raises errors of many kinds on damaged files
        raise damaged(request.media_format) from error
    return reply


@contextmanager
def _opened(data: memoryview, limits: MediaLimits) -> Iterator[tuple[Any, Any]]:
    """Open a file's first video stream; nothing but these bytes is ever read.

    Codecs are restricted while the container is opened too: libavformat tries decoders then.
    """
    options = {
        "format_whitelist": _FORMATS,
        "codec_whitelist": ",".join(_CODECS),
        "protocol_whitelist": "none",
        "enable_drefs": "0",
    }
    with av.open(io.BytesIO(data), mode="r", container_options=options) as container:
        stream = next((s for s in container.streams.video if not _is_cover(s)), None)
        if stream is None:
            raise Refusal("has no video stream")
        codec = stream.codec_context
        if codec is None or codec.name not in _CODECS:
            raise Refusal(
                "has a video codec that isn't accepted; H.264, H.265, AV1, VP8, VP9 and MPEG-4 are"
            )
        # libavcodec refuses larger frames itself, whatever the container's header says.
        codec.options = {"max_pixels": str(limits.max_pixels)}
        codec.thread_count = DECODER_THREADS
        codec.thread_type = "AUTO"
        yield container, stream


def _is_cover(stream: Any) -> bool:
    return bool(stream.disposition & stream.disposition.attached_pic)


# ---- before decoding -----------------------------------------------------------------------------


def _inspect(data: memoryview, request: DecodingRequest) -> _Facts:
    """Check the header, and count the packets."""
    limits = request.limits
    with _opened(data, limits) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        check_size((width, height), limits.max_pixels)
        _check_frames(stream.frames, limits)
        duration_s = _seconds(stream.duration, stream.time_base)
        if container.duration:
            duration_s = max(duration_s, container.duration / av.time_base)
        _check_duration(duration_s, limits)
        packets, span_s = _count(container, stream, limits)
        if not packets:
            raise damaged(request.media_format)
        _check_duration(span_s, limits)
        rate = stream.average_rate or stream.guessed_rate
        fps = float(rate) if rate else packets / (duration_s or span_s or packets / _DEFAULT_FPS)
    return _Facts(width, height, fps, packets)


def _count(container: Any, stream: Any, limits: MediaLimits) -> tuple[int, float]:
    """Return how many packets there are, and how many seconds from the first to the last."""
    packets, first, last = 0, None, 0
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        if packet.is_corrupt:
            raise Refusal("is truncated or damaged: a part of the video is missing")
        packets += 1
        _check_frames(packets, limits)
        if packet.pts is not None:
            first = packet.pts if first is None else min(first, packet.pts)
            last = max(last, packet.pts)
            _check_duration(_seconds(last - first, stream.time_base), limits)
    return packets, _seconds(last - (first or 0), stream.time_base)


def _seconds(ticks: int | None, time_base: Any) -> float:
    return float((ticks or 0) * time_base) if time_base else 0.0


def _check_frames(frames: int, limits: MediaLimits) -> None:
    if frames > limits.max_video_frames:
        # Counting stops at the limit, so a video may have more than are said here.
        raise Refusal(
            f"has {frames} frames or more; {limits.max_video_frames} are allowed: "
            "send a shorter video, or one with fewer frames per second"
        )


def _check_duration(duration_s: float, limits: MediaLimits) -> None:
    if duration_s > limits.max_video_s:
        raise Refusal(
            f"lasts {duration_s:.1f} s; {limits.max_video_s:g} s are allowed: send a shorter video"
        )


# ---- decoding ------------------------------------------------------------------------------------


def _decode(
    data: memoryview, request: DecodingRequest, facts: _Facts, total: int
) -> tuple[Reply, int]:
    """Decode as if the video had ``total`` frames; returns how many it really has, too."""
    limits = request.limits
    if total < 1:
        raise damaged(request.media_format)
    indices = sample(
        request.sampling, total, facts.fps, fps=limits.fps, max_frames=limits.max_frames
    )
    _check_decoded(facts, len(indices), limits)
    wanted, frames, decoded = frozenset(indices), dict[int, Pixels](), 0
    size, reformatter = (0, 0), VideoReformatter()
    with _opened(data, limits) as (container, stream):
        for frame in container.decode(stream):
            if (frame.width, frame.height) != (facts.width, facts.height):
                raise Refusal(
                    f"changes from {facts.width} x {facts.height} to {frame.width} x "
                    f"{frame.height} pixels; one size is accepted"
                )
            if decoded in wanted:
                size, frames[decoded] = _pixels(reformatter, frame)
            decoded += 1
            _check_frames(decoded, limits)
    chosen = tuple(index for index in indices if index in frames)
    width, height = size
    response = DecodingResponse(
        outcome=DecodingOutcome.DECODED,
        width=width,
        height=height,
        count=len(chosen),
        total_frames=decoded,
        fps=facts.fps,
        nbytes=width * height * RGB * len(chosen),
    )
    return Reply(response, chosen, tuple(frames[index] for index in chosen)), decoded


def _check_decoded(facts: _Facts, count: int, limits: MediaLimits) -> None:
    nbytes = facts.width * facts.height * RGB * count
    if nbytes > limits.max_decoded_bytes:
        raise Refusal(
            f"has {count} frames of {facts.width} x {facts.height} pixels to be read, {nbytes} "
            f"bytes; {limits.max_decoded_bytes} are allowed: send a smaller or a shorter one"
        )


def _pixels(reformatter: VideoReformatter, frame: Any) -> tuple[tuple[int, int], Pixels]:
    """Convert a frame to RGB and rotate it as the file says; returns its size, too."""
    transpose = _UPRIGHT.get(round(frame.rotation) % 360)
    (plane,) = reformatter.reformat(frame, format="rgb24").planes
    size = (frame.width, frame.height)
    if transpose is None and plane.line_size == frame.width * RGB:
        return size, memoryview(plane)[: frame.height * plane.line_size]
    image = Image.frombuffer("RGB", size, plane, "raw", "RGB", plane.line_size, 1)
    if transpose is not None:
        image = image.transpose(transpose)
    return image.size, image.tobytes()
