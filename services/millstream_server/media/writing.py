"""Writes images and videos to files' bytes. The same pixels and texts give the same bytes.

Nothing of the time, the machine or the request goes into a file. All of it takes time: call it in a
thread. Not for clients' files: these are only read by `media.decoding`, in processes of their own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import av
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from millstream_server.media.items import Frames

SOFTWARE = "Millstream"
PREVIEW_SIZE = 512
"""Most pixels on the longer side of a preview."""
_RGB = 3
_PNG_COMPRESSION = 3
"""Half the time of zlib's default, for files some 15 % larger."""
_WEBP_METHOD, _WEBP_EFFORT = 2, 50
_EXIF_DESCRIPTION, _EXIF_SOFTWARE = 0x010E, 0x0131
_PREVIEW_QUALITY = 75
_H264_QUALITY = "18"
"""x264's constant rate factor: hardly any difference can be seen."""
_BT709 = 1
_LIMITED_RANGE = 1


def png(frames: Frames, description: str, texts: Mapping[str, str]) -> bytes:
    """Return a PNG of the first frame, with ``texts`` as iTXt chunks by their keywords."""
    info = PngInfo()
    info.add_itxt("Software", SOFTWARE)
    info.add_itxt("Description", description)
    for keyword, text in texts.items():
        info.add_itxt(keyword, text)
    return _saved(frames, "PNG", pnginfo=info, compress_level=_PNG_COMPRESSION)


def webp(frames: Frames, description: str) -> bytes:
    """Return a lossless WebP of the first frame; the EXIF data have an ASCII ``description``."""
    exif = Image.Exif()
    exif[_EXIF_DESCRIPTION] = description
    exif[_EXIF_SOFTWARE] = SOFTWARE
    return _saved(
        frames,
        "WEBP",
        lossless=True,
        method=_WEBP_METHOD,
        quality=_WEBP_EFFORT,
        exif=exif.tobytes(),
    )


def preview(frames: Frames) -> bytes:
    """Return a small WebP of the first frame, at most `PREVIEW_SIZE` pixels wide and high."""
    image = _image(frames)
    image.thumbnail((PREVIEW_SIZE, PREVIEW_SIZE))
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=_PREVIEW_QUALITY, method=0)
    return buffer.getvalue()


def mp4(frames: Frames, fps: int, title: str, comment: str) -> bytes:
    """Return an MP4 (H.264, 4:2:0), as players and browsers show it.

    Raises:
        ValueError: width or height is odd, which 4:2:0 can't be.
    """
    if frames.width % 2 or frames.height % 2:
        raise ValueError(f"a video of {frames.width} x {frames.height}: both must be even")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        output.metadata["title"] = title
        output.metadata["comment"] = comment
        stream = _video_stream(output, frames, fps)
        for index in range(frames.count):
            frame = av.VideoFrame.from_image(_image(frames, index))
            target = {"dst_colorspace": "ITU709", "dst_color_range": "MPEG"}
            output.mux(stream.encode(frame.reformat(format="yuv420p", **target)))
        output.mux(stream.encode())
    return buffer.getvalue()


def _video_stream(output: Any, frames: Frames, fps: int) -> Any:
    # One thread: then the bytes don't depend on the number of cores.
    options = {"crf": _H264_QUALITY, "preset": "medium", "threads": "1"}
    stream = output.add_stream("libx264", rate=fps, options=options)
    stream.width, stream.height, stream.pix_fmt = frames.width, frames.height, "yuv420p"
    context = stream.codec_context
    context.color_primaries = context.color_trc = context.colorspace = _BT709
    context.color_range = _LIMITED_RANGE
    return stream


def _saved(frames: Frames, name: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    _image(frames).save(buffer, name, **options)
    return buffer.getvalue()


def _image(frames: Frames, index: int = 0) -> Any:
    nbytes = frames.width * frames.height * _RGB
    pixels = frames.data[index * nbytes : (index + 1) * nbytes]
    return Image.frombuffer("RGB", (frames.width, frames.height), pixels)
