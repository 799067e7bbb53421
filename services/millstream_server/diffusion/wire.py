"""Conversion of what streams of images and videos carry.

What a message has that can't be read raises `InvalidRequestError`, with its field.
"""

from __future__ import annotations

from typing import Any, TypeVar

from millstream.v1 import diffusion_pb2, worker_pb2
from millstream_server.diffusion.diffuser import DiffuserInfo
from millstream_server.diffusion.request import (
    Chunk,
    DiffusionRequest,
    DiffusionSettings,
    FileFormat,
    Finished,
    Kind,
    OutputFile,
    Progress,
)
from millstream_server.protobuf.common import (
    ENGINE_FIELDS,
    duration,
    known,
    optional,
    read_common,
    same_fields,
    seconds,
    values,
    write_common,
)
from millstream_server.protobuf.errors import error_from_proto, error_to_proto
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.rpc.slot_session import SlotContent
from millstream_server.runtime.telemetry.trace_context import TraceContext

Response = diffusion_pb2.GenerateImageResponse | diffusion_pb2.GenerateVideoResponse
ResponseT = TypeVar(
    "ResponseT", diffusion_pb2.GenerateImageResponse, diffusion_pb2.GenerateVideoResponse
)
Content = SlotContent[Progress | Chunk, Finished]

_FORMATS = {
    diffusion_pb2.IMAGE_FORMAT_UNSPECIFIED: FileFormat.PNG,
    diffusion_pb2.IMAGE_FORMAT_PNG: FileFormat.PNG,
    diffusion_pb2.IMAGE_FORMAT_WEBP: FileFormat.WEBP,
}
_FORMATS_TO_PROTO = {
    FileFormat.PNG: diffusion_pb2.IMAGE_FORMAT_PNG,
    FileFormat.WEBP: diffusion_pb2.IMAGE_FORMAT_WEBP,
}
_TO_URL = {
    diffusion_pb2.OUTPUT_DELIVERY_UNSPECIFIED: False,
    diffusion_pb2.OUTPUT_DELIVERY_BYTES: False,
    diffusion_pb2.OUTPUT_DELIVERY_URL: True,
}
_OPTIONAL = same_fields(diffusion_pb2.DiffusionOptions, DiffusionRequest, optional=True)
_OPTIONS = same_fields(diffusion_pb2.DiffusionOptions, DiffusionRequest)
_SETTINGS = same_fields(diffusion_pb2.DiffusionSettings, DiffusionSettings)
_PROGRESS = same_fields(diffusion_pb2.DiffusionProgress, Progress)
_USAGE = same_fields(diffusion_pb2.DiffusionUsage, Finished)
_MODEL = same_fields(worker_pb2.DiffusionModelInfo, DiffuserInfo)


# ---- requests ------------------------------------------------------------------------------------


def image_from_proto(message: diffusion_pb2.StartImage, stream: TraceContext) -> DiffusionRequest:
    """Convert a start with its whole input image; ``stream`` is the stream's trace context."""
    if message.input_image.upload_id:
        raise InvalidRequestError.of(
            "input_image.upload_id", "is for a Processor: a worker takes the file in `data`"
        )
    return DiffusionRequest(
        kind=Kind.IMAGE,
        format=known("format", _FORMATS, message.format),
        input_image=message.input_image.data,
        strength=optional(message.input_image, "strength"),
        **_common_from_proto(message, stream),
    )


def video_from_proto(message: diffusion_pb2.StartVideo, stream: TraceContext) -> DiffusionRequest:
    """Convert a start; ``stream`` is the stream's trace context."""
    return DiffusionRequest(
        kind=Kind.VIDEO,
        format=FileFormat.MP4,
        frames=optional(message, "frames"),
        fps=optional(message, "fps"),
        **_common_from_proto(message, stream),
    )


def _common_from_proto(
    message: diffusion_pb2.StartImage | diffusion_pb2.StartVideo, stream: TraceContext
) -> dict[str, Any]:
    options = message.options
    return {
        **values(options, _OPTIONS),
        "to_url": known("options.delivery", _TO_URL, options.delivery),
        **{name: optional(options, name) for name in _OPTIONAL},
        **read_common(message, stream),
    }


def image_to_proto(slot: int, request: DiffusionRequest) -> diffusion_pb2.GenerateImageRequest:
    """Convert a request for images to the message that starts it."""
    message = diffusion_pb2.GenerateImageRequest()
    start = message.start
    _write_start(start, slot, request)
    start.format = _FORMATS_TO_PROTO[request.format]
    if request.input_image:
        start.input_image.data = request.input_image
        if request.strength is not None:
            start.input_image.strength = request.strength
    return message


def video_to_proto(slot: int, request: DiffusionRequest) -> diffusion_pb2.GenerateVideoRequest:
    """Convert a request for videos to the message that starts it."""
    message = diffusion_pb2.GenerateVideoRequest()
    start = message.start
    _write_start(start, slot, request)
    if request.frames is not None:
        start.frames = request.frames
    if request.fps is not None:
        start.fps = request.fps
    return message


def _write_start(
    start: diffusion_pb2.StartImage | diffusion_pb2.StartVideo,
    slot: int,
    request: DiffusionRequest,
) -> None:
    start.slot = slot
    options = start.options
    if request.to_url:
        options.delivery = diffusion_pb2.OUTPUT_DELIVERY_URL
    for name, value in values(request, _OPTIONS + _OPTIONAL).items():
        if value is not None:
            setattr(options, name, value)
    write_common(start, request)


# ---- responses -----------------------------------------------------------------------------------


def image_response(content: Content) -> diffusion_pb2.GenerateImageResponse:
    """Make a message of a stream of images."""
    return _filled(diffusion_pb2.GenerateImageResponse(), content)


def video_response(content: Content) -> diffusion_pb2.GenerateVideoResponse:
    """Make a message of a stream of videos."""
    return _filled(diffusion_pb2.GenerateVideoResponse(), content)


def _filled(response: ResponseT, content: Content) -> ResponseT:
    for slot, entry in (*content.latest, *content.entries):
        if isinstance(entry, Progress):
            elapsed = duration(entry.elapsed_s)
            response.progress.add(slot=slot, elapsed=elapsed, **values(entry, _PROGRESS))
        else:
            response.chunks.add(slot=slot, output=entry.output, data=entry.data, last=entry.last)
    response.finished.extend(_finished_to_proto(slot, end) for slot, end in content.finished)
    for slot, error in content.errors:
        response.errors.add(slot=slot, error=error_to_proto(error))
    response.draining = content.draining
    return response


def _finished_to_proto(slot: int, end: Finished) -> diffusion_pb2.DiffusionFinished:
    return diffusion_pb2.DiffusionFinished(
        slot=slot,
        request_id=end.request_id,
        settings=diffusion_pb2.DiffusionSettings(
            strength=end.settings.strength, **values(end.settings, _SETTINGS)
        ),
        outputs=[
            diffusion_pb2.DiffusionOutput(
                seed=file.seed,
                total_bytes=file.total_bytes,
                media_type=file.format.value,
                url=file.url,
            )
            for file in end.outputs
        ],
        usage=diffusion_pb2.DiffusionUsage(
            queued=duration(end.queued_s), running=duration(end.running_s), **values(end, _USAGE)
        ),
    )


def content_from_proto(response: Response) -> Content:
    """Convert a message of either kind of stream."""
    return SlotContent(
        latest=[
            (
                message.slot,
                Progress(elapsed_s=seconds(message.elapsed), **values(message, _PROGRESS)),
            )
            for message in response.progress
        ],
        entries=[
            (chunk.slot, Chunk(chunk.output, chunk.data, chunk.last)) for chunk in response.chunks
        ],
        finished=[(message.slot, _finished_from_proto(message)) for message in response.finished],
        errors=[(message.slot, error_from_proto(message.error)) for message in response.errors],
        draining=response.draining,
    )


def _finished_from_proto(message: diffusion_pb2.DiffusionFinished) -> Finished:
    formats = {known_format.value: known_format for known_format in FileFormat}
    settings, usage = message.settings, message.usage
    return Finished(
        request_id=message.request_id,
        settings=DiffusionSettings(
            strength=optional(settings, "strength"), **values(settings, _SETTINGS)
        ),
        outputs=tuple(
            OutputFile(
                seed=output.seed,
                total_bytes=output.total_bytes,
                format=known("media_type", formats, output.media_type),
                url=output.url,
            )
            for output in message.outputs
        ),
        queued_s=seconds(usage.queued),
        running_s=seconds(usage.running),
        **values(usage, _USAGE),
    )


# ---- what a worker makes -------------------------------------------------------------------------


def diffusion_model_to_proto(info: DiffuserInfo) -> worker_pb2.DiffusionModelInfo:
    """Convert the facts and limits of a worker's engine."""
    return worker_pb2.DiffusionModelInfo(
        images=Kind.IMAGE in info.kinds,
        videos=Kind.VIDEO in info.kinds,
        schedulers=info.schedulers,
        **values(info, _MODEL),
    )


def diffuser_from_proto(info: worker_pb2.WorkerInfo) -> DiffuserInfo:
    """Read `WorkerInfo.diffusion_model` and the fields that every worker has.

    Raises:
        ValueError: it makes nothing that is known.
    """
    message = info.diffusion_model
    makes = {Kind.IMAGE: message.images, Kind.VIDEO: message.videos}
    kinds = frozenset(kind for kind, made in makes.items() if made)
    if not kinds:
        error = "the worker makes neither images nor videos"
        raise ValueError(error)
    return DiffuserInfo(
        kinds=kinds,
        schedulers=tuple(message.schedulers),
        **values(message, _MODEL),
        **values(info, ENGINE_FIELDS),
    )
