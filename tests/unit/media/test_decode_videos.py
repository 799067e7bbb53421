"""Videos decoded in this process: containers, codecs, frames, limits."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from PIL import Image

from millstream_server.media.decoding import videos
from millstream_server.media.decoding.sampling import FrameSampling, sample
from millstream_server.media.decoding.wire import DecodingRequest, Refusal, Reply
from millstream_server.media.items import MediaLimits, Modality
from millstream_server.media.sniff import check_media
from tests.support.media.media_files import VIDEO_STEP, sound, video

LIMITS = MediaLimits()
DAMAGED = "is truncated or damaged: it can't be decoded as"


def _decode(
    data: bytes,
    limits: MediaLimits = LIMITS,
    sampling: FrameSampling = FrameSampling.LINSPACE,
) -> Reply:
    request = DecodingRequest(
        media_format=check_media(data, Modality.VIDEO),
        sampling=sampling,
        limits=limits,
        nbytes=len(data),
    )
    return videos.decode_video(memoryview(bytearray(data)), request)


def _refusal(data: bytes, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(Refusal) as refused:
        _decode(data, limits)
    return str(refused.value)


def _images(reply: Reply) -> list[Image.Image]:
    size = (reply.response.width, reply.response.height)
    assert reply.response.count == len(reply.parts) == len(reply.indices)
    assert reply.response.nbytes == sum(map(len, reply.parts))
    return [Image.frombytes("RGB", size, bytes(part)) for part in reply.parts]


def _brightness(image: Image.Image) -> int:
    """Return what `video` wrote into a frame, at its bottom right corner."""
    pixel = image.getpixel((image.width - 4, image.height - 4))
    assert isinstance(pixel, tuple)
    return int(pixel[0])


@pytest.mark.parametrize(
    ("container", "codec", "size"),
    [
        ("mp4", "libx264", (64, 48)),
        ("mp4", "libx265", (64, 64)),
        ("mp4", "mpeg4", (64, 48)),
        ("mp4", "libsvtav1", (64, 64)),
        ("mov", "libx264", (64, 48)),
        ("matroska", "libx264", (64, 48)),
        ("webm", "libvpx", (65, 49)),
        ("webm", "libvpx-vp9", (65, 49)),
    ],
)
def test_each_container_and_codec(container: str, codec: str, size: tuple[int, int]) -> None:
    reply = _decode(video(30, size=size, container=container, codec=codec))
    assert (reply.response.width, reply.response.height) == size
    assert (reply.response.total_frames, reply.response.fps) == (30, 4.0)
    assert reply.indices == sample(FrameSampling.LINSPACE, 30, 4.0, fps=2.0, max_frames=128)
    assert len(reply.indices) == 15
    for index, image in zip(reply.indices, _images(reply), strict=True):
        assert abs(_brightness(image) - index * VIDEO_STEP) <= 4


def test_the_other_sampling() -> None:
    reply = _decode(video(10), sampling=FrameSampling.ARANGE)
    assert reply.indices == (0, 2, 5, 7)


def test_a_header_without_a_number_of_frames() -> None:
    reply = _decode(video(12, fragmented=True))
    assert (reply.response.total_frames, reply.indices) == (12, (0, 2, 4, 7, 9, 11))


def test_frames_are_chosen_anew_where_packets_hold_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # As VP8's alternative references do.
    count = videos._count

    def more(*arguments: Any) -> tuple[int, float]:
        packets, span_s = count(*arguments)
        return packets + 7, span_s

    monkeypatch.setattr(videos, "_count", more)
    reply = _decode(video(12))
    assert (reply.response.total_frames, reply.indices) == (12, (0, 2, 4, 7, 9, 11))


@pytest.mark.parametrize(
    ("rotation", "size", "red_at"),
    [
        (0, (64, 48), (4, 4)),
        (90, (48, 64), (4, 59)),
        (180, (64, 48), (59, 43)),
        (-90, (48, 64), (43, 4)),
    ],
)
def test_rotation_is_applied(rotation: int, size: tuple[int, int], red_at: tuple[int, int]) -> None:
    reply = _decode(video(2, rotation=rotation))
    assert (reply.response.width, reply.response.height) == size
    pixel = _images(reply)[0].getpixel(red_at)
    assert isinstance(pixel, tuple)
    assert (pixel[0] > 200, pixel[1] < 60) == (True, True)


def test_sound_is_ignored() -> None:
    assert _decode(video(4, audio=True)).response.total_frames == 4


def test_one_frame() -> None:
    reply = _decode(video(1))
    assert (reply.response.total_frames, reply.indices) == (1, (0,))


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_truncated_files_are_refused(container: str) -> None:
    data = video(40, container=container)
    for end in (200, len(data) // 2, len(data) - 1):
        assert _refusal(data[:end]).startswith(DAMAGED), end


def test_a_damaged_file_is_refused() -> None:
    data = video(4)
    assert _refusal(data.replace(b"moov", b"junk")).startswith(DAMAGED)


def test_sound_alone_is_refused() -> None:
    assert _refusal(sound()) == "has no video stream"


def test_other_codecs_are_refused() -> None:
    assert _refusal(video(2, codec="mjpeg")) == (
        "has a video codec that isn't accepted; H.264, H.265, AV1, VP8, VP9 and MPEG-4 are"
    )


def test_too_large_a_frame() -> None:
    assert _refusal(video(2), MediaLimits(max_pixels=64 * 48 - 1)) == (
        "is 64 x 48 = 3072 pixels; 3071 are allowed: send a smaller one"
    )
    assert _decode(video(2), MediaLimits(max_pixels=64 * 48)).response.width == 64


def test_a_header_that_understates_the_size() -> None:
    # The size in the header is 64 x 48, the size in the codec's own data 640 x 480.
    data = bytearray(video(2, size=(640, 480)))
    entry = data.index(b"avc1", data.index(b"stsd")) + 28
    assert data[entry : entry + 4] == struct.pack(">HH", 640, 480)
    data[entry : entry + 4] = struct.pack(">HH", 64, 48)
    assert _refusal(bytes(data), MediaLimits(max_pixels=100_000)) in {
        "is 640 x 480 = 307200 pixels; 100000 are allowed: send a smaller one",
        "is truncated or damaged: it can't be decoded as MP4",
    }


def test_too_many_frames_in_the_header() -> None:
    data = bytearray(video(5))
    at = data.index(b"stsz") + 12
    assert data[at : at + 4] == struct.pack(">I", 5)
    assert _refusal(video(5), MediaLimits(max_video_frames=4)) == (
        "has 5 frames or more; 4 are allowed: send a shorter video, or one with fewer frames per "
        "second"
    )


def test_too_many_frames_that_the_header_does_not_tell() -> None:
    for data in (video(9, container="webm", codec="libvpx"), video(9, fragmented=True)):
        assert _refusal(data, MediaLimits(max_video_frames=7)).startswith(
            "has 8 frames or more; 7 are allowed:"
        )


def test_too_long_a_video() -> None:
    for data in (video(8), video(8, container="webm", codec="libvpx"), video(8, fragmented=True)):
        assert _decode(data, MediaLimits(max_video_s=2.0)).response.total_frames == 8
        refusal = _refusal(data, MediaLimits(max_video_s=1.5))
        assert refusal.endswith("1.5 s are allowed: send a shorter video")
        assert refusal.startswith(("lasts 2.0 s;", "lasts 1.8 s;"))


def test_frames_that_together_take_too_much_memory() -> None:
    one = 64 * 48 * 3
    assert _refusal(video(8), MediaLimits(max_decoded_bytes=4 * one - 1)) == (
        f"has 4 frames of 64 x 48 pixels to be read, {4 * one} bytes; {4 * one - 1} are allowed: "
        "send a smaller or a shorter one"
    )
    assert len(_decode(video(8), MediaLimits(max_decoded_bytes=4 * one)).parts) == 4


def test_a_playlist_inside_a_video_container_is_refused() -> None:
    # What the container's demuxer doesn't understand isn't given to another one.
    assert _refusal(b"\0\0\0\x10ftypisom\0\0\0\0#EXTM3U\nfile:///etc/hostname\n").startswith(
        DAMAGED
    )
