"""Images decoded in this process: formats, modes, orientation, limits."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from millstream_server.media.decoding.images import decode_image
from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.decoding.wire import DecodingRequest, Refusal, Reply
from millstream_server.media.items import MediaLimits, Modality
from millstream_server.media.sniff import check_media
from tests.support.media.media_files import png_header, saved, solid

LIMITS = MediaLimits()


def _decode(data: bytes, limits: MediaLimits = LIMITS) -> Reply:
    request = DecodingRequest(
        media_format=check_media(data, Modality.IMAGE),
        sampling=FrameSampling.LINSPACE,
        limits=limits,
        nbytes=len(data),
    )
    return decode_image(memoryview(bytearray(data)), request)


def _image(data: bytes) -> Image.Image:
    reply = _decode(data)
    (pixels,) = reply.parts
    size = (reply.response.width, reply.response.height)
    assert len(pixels) == reply.response.nbytes
    assert reply.indices == (0,)
    return Image.frombytes("RGB", size, bytes(pixels))


def _refusal(data: bytes, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(Refusal) as refused:
        _decode(data, limits)
    return str(refused.value)


def _picture(size: tuple[int, int] = (6, 4)) -> Image.Image:
    """Return a picture in which no two pixels are the same."""
    picture = Image.new("RGB", size)
    for x in range(size[0]):
        for y in range(size[1]):
            picture.putpixel((x, y), (x * 40, y * 60, 128))
    return picture


@pytest.mark.parametrize("media_format", ["PNG", "WEBP"])
def test_lossless_formats_are_exact(media_format: str) -> None:
    decoded = _image(saved(_picture(), media_format, lossless=True))
    assert decoded.tobytes() == _picture().tobytes()
    assert decoded.size == (6, 4)


@pytest.mark.parametrize("media_format", ["JPEG", "GIF"])
def test_lossy_formats(media_format: str) -> None:
    decoded = _image(solid(media_format, (5, 3), "blue"))
    assert decoded.size == (5, 3)
    red, green, blue = decoded.getpixel((4, 2))
    assert (red < 3, green < 3, blue > 250) == (True, True, True)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("media_format", ["PNG", "WEBP"])
def test_orientation_is_applied(orientation: int, media_format: str) -> None:
    upright = _picture()
    # What a camera stores whose picture is shown upright with this orientation.
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(stored, media_format, exif=exif, lossless=True)
    assert _image(data).tobytes() == upright.tobytes()
    assert _image(data).size == upright.size


def test_orientation_of_a_jpeg() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert _image(saved(_picture((40, 20)), "JPEG", exif=exif)).size == (20, 40)


@pytest.mark.parametrize("exif", [b"Exif\0\0junk", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b""])
def test_damaged_exif_does_no_harm(exif: bytes) -> None:
    assert _image(saved(_picture(), "PNG", exif=exif)).tobytes() == _picture().tobytes()


def _rgba() -> Image.Image:
    return Image.new("RGBA", (2, 2), (10, 200, 30, 0))


def _palette_with_transparency() -> Image.Image:
    image = Image.new("P", (2, 2), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    image.info["transparency"] = 1
    return image


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        pytest.param(
            _rgba(), (10, 200, 30), id="transparent: the colour under it, as transformers"
        ),
        pytest.param(_palette_with_transparency(), (10, 200, 30), id="palette"),
        pytest.param(Image.new("LA", (2, 2), (77, 0)), (77, 77, 77), id="grey with alpha"),
        pytest.param(Image.new("L", (2, 2), 77), (77, 77, 77), id="grey"),
        pytest.param(Image.new("1", (2, 2), 1), (255, 255, 255), id="1 bit"),
        pytest.param(Image.new("I;16", (2, 2), 0x80FF), (128, 128, 128), id="16 bit"),
    ],
)
def test_modes_become_rgb(image: Image.Image, pixel: tuple[int, ...]) -> None:
    assert _image(saved(image, "PNG")).getpixel((1, 1)) == pixel


def test_pillow_would_clip_16_bits() -> None:
    # Why 16-bit grey is scaled: once this fails, `convert` can do it.
    clipped = Image.open(io.BytesIO(saved(Image.new("I;16", (2, 2), 0x80FF), "PNG"))).convert("RGB")
    assert clipped.getpixel((1, 1)) == (255, 255, 255)


def test_cmyk() -> None:
    red, green, blue = _image(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")).getpixel(
        (4, 4)
    )
    assert (red > 250, green < 5, blue < 5) == (True, True, True)


@pytest.mark.parametrize("media_format", ["PNG", "GIF", "WEBP"])
def test_an_animated_image_is_its_first_frame(media_format: str) -> None:
    others = [Image.new("RGB", (8, 8), color) for color in ("lime", "blue")]
    first = Image.new("RGB", (8, 8), "red")
    options: dict[str, Any] = {"save_all": True, "append_images": others, "duration": 100}
    if media_format == "WEBP":
        options["lossless"] = True
    data = saved(first, media_format, **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    assert _image(data).getpixel((4, 4)) == (255, 0, 0)


@pytest.mark.parametrize("media_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated_files_are_refused(media_format: str) -> None:
    data = saved(Image.effect_noise((64, 64), 90).convert("RGB"), media_format)
    shown = "WebP" if media_format == "WEBP" else media_format
    for end in (40, len(data) // 2, len(data) * 9 // 10):
        assert _refusal(data[:end]) == f"is truncated or damaged: it can't be decoded as {shown}"


def test_too_many_pixels_are_refused_by_the_header() -> None:
    assert _refusal(png_header(20_000, 20_000)) == (
        "is 20000 x 20000 = 400000000 pixels; 36000000 are allowed: send a smaller one"
    )


@pytest.mark.parametrize("media_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_too_many_pixels_of_each_format(media_format: str) -> None:
    limits = MediaLimits(max_pixels=99)
    data = solid(media_format, (10, 10))
    assert _refusal(data, limits) == ("is 10 x 10 = 100 pixels; 99 are allowed: send a smaller one")
    assert _decode(data, MediaLimits(max_pixels=100)).response.width == 10


@pytest.mark.parametrize("kind", ["lossy", "lossless", "extended"])
def test_a_webp_is_measured_before_pillow_opens_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Opening makes a canvas of the size that the file claims.
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    exif = Image.Exif()
    exif[0x0112] = 1
    data = saved(
        Image.new("RGB", (300, 200)),
        "WEBP",
        lossless=kind == "lossless",
        **({"exif": exif} if kind == "extended" else {}),
    )
    assert data[12:16] == {"lossy": b"VP8 ", "lossless": b"VP8L", "extended": b"VP8X"}[kind]
    assert _refusal(data, MediaLimits(max_pixels=100)).startswith("is 300 x 200 = 60000 pixels;")
