"""Makes the request messages of images and videos from plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from millstream.v1 import diffusion_pb2, processor_pb2
from millstream_client.errors import MediaFileError
from millstream_client.knobs import check_names
from millstream_client.media import Image, MediaSource

if TYPE_CHECKING:
    from typing import Unpack

_OF_REQUESTS = ("model", "request_id", "priority")


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


class MediaKnobs(DiffusionKnobs, total=False):
    """What a request for images or videos may be given."""

    model: str
    request_id: str
    priority: processor_pb2.RequestPriority.ValueType


class ImageKnobs(MediaKnobs, total=False):
    """What a request for images may be given."""

    image: MediaSource | None
    strength: float | None
    format: diffusion_pb2.ImageFormat.ValueType


class VideoKnobs(MediaKnobs, total=False):
    """What a request for videos may be given."""

    frames: int | None
    fps: int | None


def image_request(
    prompt: str,
    *,
    image: MediaSource | None = None,
    strength: float | None = None,
    format: diffusion_pb2.ImageFormat.ValueType = diffusion_pb2.IMAGE_FORMAT_PNG,  # noqa: A002 - the contract's name
    **knobs: Unpack[MediaKnobs],
) -> diffusion_pb2.GenerateImageRequest:
    """Make the message of a request for images; reads the input image's file.

    Raises:
        MediaFileError: the input image can't be read.
        TypeError: an unknown knob, or a value of the wrong type.
        ValueError: a value that doesn't fit its field.
    """
    start = diffusion_pb2.StartImage(format=format, **_diffusion(prompt, **knobs))
    if image is not None:
        part = Image(image).read().image
        if part.WhichOneof("source") != "data":
            raise MediaFileError("an input image is given as a file's path or bytes, not as a URL")
        start.input_image.data = part.data
        if strength is not None:
            start.input_image.strength = strength
    return diffusion_pb2.GenerateImageRequest(start=start)


def video_request(
    prompt: str, *, frames: int | None = None, fps: int | None = None, **knobs: Unpack[MediaKnobs]
) -> diffusion_pb2.GenerateVideoRequest:
    """Make the message of a request for videos.

    Raises:
        TypeError: an unknown knob, or a value of the wrong type.
        ValueError: a value that doesn't fit its field.
    """
    start = diffusion_pb2.StartVideo(frames=frames, fps=fps, **_diffusion(prompt, **knobs))
    return diffusion_pb2.GenerateVideoRequest(start=start)


def _diffusion(prompt: str, **knobs: Any) -> dict[str, Any]:
    """Return the fields that both requests have; knobs left out are unset, for the defaults."""
    check_names(knobs, MediaKnobs, "an image or a video")
    fields = {name: knobs.pop(name) for name in _OF_REQUESTS if name in knobs}
    return {**fields, "options": diffusion_pb2.DiffusionOptions(prompt=prompt, **knobs)}
