"""Images and videos that a message may have: where their bytes are, and how they are read."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from millstream.v1 import chat_pb2, media_pb2
from millstream_client.errors import MediaFileError

MediaSource = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A file's path, its bytes, or an ``http:``, ``https:`` or ``data:`` URL."""

_SOURCES = (str, os.PathLike, bytes, bytearray, memoryview)
_URLS = ("http://", "https://", "data:")
_LARGEST_BYTES = 1 << 30
"""More is surely a mistake; the server's own limit is lower."""


@dataclass(frozen=True, slots=True, repr=False)
class _Media:
    """An image or a video; its file is read when the message is sent."""

    source: MediaSource
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the type, so that a mistake shows where it was made."""
        if not isinstance(self.source, _SOURCES):
            raise TypeError(
                f"{type(self).__name__} takes a file's path, its bytes or a URL,"
                f" not {type(self.source).__name__}"
            )

    def __repr__(self) -> str:
        source = self.source
        if not isinstance(source, (str, os.PathLike)):
            shown = f"<{len(source)} bytes>"
        elif isinstance(source, str) and source.lower().startswith("data:"):
            shown = f"<data: URL of {len(source)} characters>"
        else:
            shown = repr(os.fspath(source))
        return f"{type(self).__name__}({shown})"

    def check(self) -> None:
        """Check that a file is there and has content, without reading it.

        Raises:
            MediaFileError: it isn't so.
        """
        source = self.source
        if isinstance(source, (str, os.PathLike)):
            if not _is_url(source) and (problem := _problem(Path(source))):
                raise MediaFileError(f"{os.fspath(source)} can't be sent: {problem}")
        elif not len(source):
            raise MediaFileError(f"the bytes of the {self.kind} are empty")

    def read(self) -> chat_pb2.ContentPart:
        """Read it; blocks while it reads a file.

        Raises:
            MediaFileError: the file can't be read.
        """
        self.check()
        source = self.source
        if not isinstance(source, (str, os.PathLike)):
            media = media_pb2.Media(data=bytes(source))
        elif _is_url(source):
            media = media_pb2.Media(url=os.fspath(source))
        else:
            try:
                media = media_pb2.Media(data=Path(source).read_bytes())
            except OSError as error:
                problem = f"it can't be read ({error.strerror})"
                raise MediaFileError(f"{os.fspath(source)} can't be sent: {problem}") from error
        part = chat_pb2.ContentPart()
        (part.image if self.kind == "image" else part.video).CopyFrom(media)
        return part


class Image(_Media):
    """An image: ``Image("cat.png")``, ``Image(png_bytes)``, ``Image("https://…/cat.png")``.

    PNG, JPEG, WebP or GIF; the server finds the format from the bytes. A URL is fetched by the
    server, if it allows that.
    """

    __slots__ = ()
    kind = "image"


class Video(_Media):
    """A video: ``Video("cat.mp4")``, ``Video(mp4_bytes)``, ``Video("https://…/cat.mp4")``.

    MP4, MOV, WebM or Matroska; the server finds the format from the bytes. A URL is fetched by the
    server, if it allows that.
    """

    __slots__ = ()
    kind = "video"


Part = str | Image | Video
"""A piece of a message's content."""

ImageInput = MediaSource | Image
VideoInput = MediaSource | Video

_Kind = TypeVar("_Kind", Image, Video)


def attached(
    image: ImageInput | None,
    images: Sequence[ImageInput],
    video: VideoInput | None,
    videos: Sequence[VideoInput],
) -> list[Image | Video]:
    """Make a list of what the keywords of a question were given."""
    return [*_several(Image, image, images), *_several(Video, video, videos)]


def _several(kind: type[_Kind], one: Any, more: Any) -> list[_Kind]:
    # A path given for several must not be read letter by letter.
    more = [more] if isinstance(more, (*_SOURCES, kind)) else more
    given = [*([] if one is None else [one]), *more]
    return [item if isinstance(item, kind) else kind(item) for item in given]


def _is_url(source: str | os.PathLike[str]) -> bool:
    return isinstance(source, str) and source.lower().startswith(_URLS)


def _problem(path: Path) -> str | None:
    """Return why a file can't be sent; None if it seems well."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "there is no such file"
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        return f"it can't be read ({getattr(error, 'strerror', None) or error})"
    if stat.S_ISDIR(status.st_mode):
        return "it is a directory, not a file"
    if not stat.S_ISREG(status.st_mode):
        return "it is a pipe or a device, not a file"
    return _size_problem(status.st_size)


def _size_problem(size: int) -> str | None:
    if not size:
        return "the file is empty"
    if size > _LARGEST_BYTES:
        return f"it has {size} bytes; at most {_LARGEST_BYTES} can be sent"
    return None
