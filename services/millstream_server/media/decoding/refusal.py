"""Why a file isn't decoded."""

from __future__ import annotations

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
