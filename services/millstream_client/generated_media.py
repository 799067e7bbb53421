"""Images and videos that a model makes: their stream, and the result."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict

from millstream.v1 import diffusion_pb2, processor_pb2
from millstream_client.errors import MediaFileError, from_request_error
from millstream_client.media import Image

if TYPE_CHECKING:
    from typing import Unpack

    from millstream_client.media import MediaSource
    from millstream_client.request import Request

_SUFFIXES = {"image/png": ".png", "image/webp": ".webp", "video/mp4": ".mp4"}


class DiffusionKnobs(TypedDict, total=False):
    """The fields of ``millstream.v1.DiffusionOptions``, without the prompt."""

    negative_prompt: str
    n: int
    width: int
    height: int
    steps: int
    guidance_scale: float
    seed: int
    scheduler: str
    delivery: diffusion_pb2.OutputDelivery.ValueType
    preview_every_steps: int


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """One image or video."""

    data: bytes = field(repr=False)
    """The file; empty if it was delivered as a URL."""
    media_type: str
    """``image/png``, ``image/webp`` or ``video/mp4``."""
    seed: int
    url: str = ""

    @property
    def suffix(self) -> str:
        """The usual suffix of a file's name, such as ``.png``; empty if the type isn't known."""
        return _SUFFIXES.get(self.media_type, "")

    def save(self, path: str | Path) -> Path:
        """Write the file; return its path."""
        target = Path(path)
        target.write_bytes(self.data)
        return target


@dataclass(slots=True)
class GeneratedMedia:
    """What was made of one request."""

    request_id: str = ""
    files: list[GeneratedFile] = field(default_factory=list)
    settings: diffusion_pb2.DiffusionSettings = field(
        default_factory=diffusion_pb2.DiffusionSettings
    )
    """What they were made with, the server's defaults filled in."""
    usage: diffusion_pb2.DiffusionUsage = field(default_factory=diffusion_pb2.DiffusionUsage)
    complete: bool = False
    _data: dict[int, bytearray] = field(default_factory=dict, repr=False)

    @property
    def begun(self) -> bool:
        """Whether bytes of a file have arrived."""
        return bool(self._data) or self.complete

    def add(self, message: Any) -> None:
        """Add one message of the stream, which has one request.

        Raises:
            MillstreamError: the request failed.
        """
        for chunk in message.chunks:
            self._data.setdefault(chunk.output, bytearray()).extend(chunk.data)
        for error in message.errors:
            raise from_request_error(error.error)
        for finished in message.finished:
            self.request_id = finished.request_id
            self.settings.CopyFrom(finished.settings)
            self.usage.CopyFrom(finished.usage)
            self.files = [
                GeneratedFile(
                    bytes(self._data.get(i, b"")), output.media_type, output.seed, output.url
                )
                for i, output in enumerate(finished.outputs)
            ]
            self._data.clear()
            self.complete = True


class MediaStream(AsyncIterator[diffusion_pb2.DiffusionProgress]):
    """Iterate it for progress, or await `result` for the files.

    Nothing is sent before that. To end the call early:
    ``async with``, `aclose`, cancelling the task that reads, or dropping the last reference.
    """

    def __init__(
        self, request: Request, media: GeneratedMedia, messages: AsyncGenerator[Any, None]
    ) -> None:
        """Wrap the messages of a request, which collects ``media``."""
        self._request = request
        self._media = media
        self._messages = messages
        self._progress: Iterator[diffusion_pb2.DiffusionProgress] = iter(())

    @property
    def request_id(self) -> str:
        """The request's id in logs and traces."""
        return self._request.request_id

    @property
    def media(self) -> GeneratedMedia:
        """The result; `GeneratedMedia.complete` says whether it is there."""
        return self._media

    async def __anext__(self) -> diffusion_pb2.DiffusionProgress:
        """Wait for the next progress.

        Raises:
            MillstreamError: the request failed.
        """
        while True:
            for progress in self._progress:
                return progress
            self._progress = iter((await anext(self._messages)).progress)

    async def result(self) -> GeneratedMedia:
        """Read to the end; return the files.

        Raises:
            MillstreamError: the request failed.
        """
        self._progress = iter(())
        while await self.read() is not None:
            pass
        return self._media

    async def read(self) -> Any:
        """Wait for the server's next message; return None at the end.

        Raises:
            MillstreamError: the request failed.
        """
        return await anext(self._messages, None)

    def cancel(self) -> None:
        """End the call while another task reads; the reader gets a RequestCancelledError."""
        self._request.cancel()

    async def aclose(self) -> None:
        """End the call; no task may be reading."""
        self._progress = iter(())
        await self._messages.aclose()

    async def __aenter__(self) -> Self:
        """Return the stream."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the call if it still runs."""
        await self.aclose()


def diffusion_options(
    prompt: str, knobs: Mapping[str, Any] | None = None, **named: Unpack[DiffusionKnobs]
) -> diffusion_pb2.DiffusionOptions:
    """Make a request's options; knobs left out are unset, for the server's defaults.

    Raises:
        TypeError: an unknown knob, or a value of the wrong type.
        ValueError: a value that doesn't fit its field.
    """
    fields: dict[str, Any] = {**(knobs or {}), **named}
    unknown = fields.keys() - diffusion_pb2.DiffusionOptions.DESCRIPTOR.fields_by_name.keys()
    if unknown:
        raise TypeError(f"{min(unknown)!r} is no option of an image or a video")
    return diffusion_pb2.DiffusionOptions(prompt=prompt, **fields)


def start_image(
    options: diffusion_pb2.DiffusionOptions,
    *,
    model: str,
    image: MediaSource | None,
    strength: float | None,
    format: diffusion_pb2.ImageFormat.ValueType,  # noqa: A002 - the contract's name
    request_id: str,
    priority: processor_pb2.RequestPriority.ValueType,
) -> diffusion_pb2.GenerateImageRequest:
    """Make the message of a request for images; reads the input image's file.

    Raises:
        MediaFileError: the input image can't be read.
    """
    request = diffusion_pb2.GenerateImageRequest()
    start = request.start
    start.options.CopyFrom(options)
    start.model, start.request_id = model, request_id
    start.format, start.priority = format, priority
    if image is not None:
        part = Image(image).read().image
        if part.WhichOneof("source") != "data":
            raise MediaFileError("an input image is given as a file's path or bytes, not as a URL")
        start.input_image.data = part.data
        if strength is not None:
            start.input_image.strength = strength
    return request
