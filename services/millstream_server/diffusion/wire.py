"""Conversion of what streams of images and videos carry."""

from __future__ import annotations

from typing import Any

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
    PRIORITIES,
    deadline_of,
    duration,
    known,
    optional,
    seconds,
    trace_of,
    write_common,
)
from millstream_server.protobuf.errors import error_from_proto, error_to_proto
from millstream_server.runtime.rpc.slot_session import SlotContent
from millstream_server.runtime.telemetry.trace_context import TraceContext

Response = diffusion_pb2.GenerateImageResponse | diffusion_pb2.GenerateVideoResponse
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
_OPTIONAL = ("n", "width", "height", "steps", "guidance_scale", "seed", "preview_every_steps")
"""Optional fields of DiffusionOptions with the same name in DiffusionRequest."""
_SETTINGS = ("model", "width", "height", "steps", "guidance_scale", "seed", "scheduler")
"""Fields of DiffusionSettings with the same name in the plain type."""

_MODEL_FIELDS = (
    "default_width",
    "default_height",
    "size_step",
    "min_size",
    "max_pixels",
    "default_steps",
    "max_steps",
    "default_guidance_scale",
    "max_outputs",
    "max_prompt_tokens",
    "image_to_image",
    "negative_prompts",
    "urls",
    "default_frames",
    "max_frames",
    "frame_step",
    "default_fps",
)
"""Fields of DiffusionModelInfo with the same name in DiffuserInfo."""


# ---- requests ------------------------------------------------------------------------------------


def image_from_proto(message: diffusion_pb2.StartImage, stream: TraceContext) -> DiffusionRequest:
    """Convert a start; ``stream`` is the stream's trace context.

    Raises:
        InvalidRequestError: an enum has an unknown value.
    """
    return DiffusionRequest(
        kind=Kind.IMAGE,
        format=known("format", _FORMATS, message.format),
        input_image=message.input_image.data,
        strength=optional(message.input_image, "strength"),
        **_common_from_proto(message, stream),
    )


def video_from_proto(message: diffusion_pb2.StartVideo, stream: TraceContext) -> DiffusionRequest:
    """Convert a start; ``stream`` is the stream's trace context.

    Raises:
        InvalidRequestError: an enum has an unknown value.
    """
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
        "prompt": options.prompt,
        "negative_prompt": options.negative_prompt,
        "scheduler": options.scheduler,
        "to_url": known("options.delivery", _TO_URL, options.delivery),
        **{name: optional(options, name) for name in _OPTIONAL},
        "model": message.model,
        "request_id": message.request_id,
        "priority": known("priority", PRIORITIES, message.priority),
        "trace": trace_of(message, stream),
        "deadline_s": deadline_of(message),
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
    start.request_id = request.request_id
    start.model = request.model
    options = start.options
    options.prompt = request.prompt
    options.negative_prompt = request.negative_prompt
    options.scheduler = request.scheduler
    if request.to_url:
        options.delivery = diffusion_pb2.OUTPUT_DELIVERY_URL
    for name in _OPTIONAL:
        if (value := getattr(request, name)) is not None:
            setattr(options, name, value)
    write_common(start, request)


# ---- responses -----------------------------------------------------------------------------------


def image_response(content: Content) -> diffusion_pb2.GenerateImageResponse:
    """Make a message of a stream of images."""
    response = diffusion_pb2.GenerateImageResponse()
    _write_response(response, content)
    return response


def video_response(content: Content) -> diffusion_pb2.GenerateVideoResponse:
    """Make a message of a stream of videos."""
    response = diffusion_pb2.GenerateVideoResponse()
    _write_response(response, content)
    return response


def _write_response(response: Response, content: Content) -> None:
    for slot, entry in (*content.latest, *content.entries):
        if isinstance(entry, Progress):
            _write_progress(response.progress.add(), slot, entry)
        else:
            response.chunks.add(slot=slot, output=entry.output, data=entry.data, last=entry.last)
    for slot, end in content.finished:
        _write_finished(response.finished.add(), slot, end)
    for slot, error in content.errors:
        response.errors.add(slot=slot, error=error_to_proto(error))
    response.draining = content.draining


def _write_progress(
    message: diffusion_pb2.DiffusionProgress, slot: int, progress: Progress
) -> None:
    message.slot = slot
    message.queue_position = progress.queue_position
    message.output = progress.output
    message.step = progress.step
    message.steps = progress.steps
    message.elapsed.FromNanoseconds(int(progress.elapsed_s * 1e9))
    message.preview = progress.preview


def _write_finished(message: diffusion_pb2.DiffusionFinished, slot: int, end: Finished) -> None:
    message.slot = slot
    message.request_id = end.request_id
    message.settings.CopyFrom(settings_to_proto(end.settings))
    for file in end.outputs:
        message.outputs.add(
            seed=file.seed,
            total_bytes=file.total_bytes,
            media_type=file.format.value,
            url=file.url,
        )
    message.usage.CopyFrom(
        diffusion_pb2.DiffusionUsage(
            steps=end.steps,
            pixel_steps=end.pixel_steps,
            prompt_tokens=end.prompt_tokens,
            queued=duration(end.queued_s),
            running=duration(end.running_s),
        )
    )


def settings_to_proto(settings: DiffusionSettings) -> diffusion_pb2.DiffusionSettings:
    """Convert settings."""
    message = diffusion_pb2.DiffusionSettings(
        frames=settings.frames,
        fps=settings.fps,
        **{name: getattr(settings, name) for name in _SETTINGS},
    )
    if settings.strength is not None:
        message.strength = settings.strength
    return message


def content_from_proto(response: Response) -> Content:
    """Convert a message of either kind of stream.

    Raises:
        InvalidRequestError: a file has a media type that isn't known.
    """
    entries: list[tuple[int, Progress | Chunk]] = [
        (chunk.slot, Chunk(chunk.output, chunk.data, chunk.last)) for chunk in response.chunks
    ]
    return SlotContent(
        latest=[(message.slot, _progress_from_proto(message)) for message in response.progress],
        entries=entries,
        finished=[(message.slot, _finished_from_proto(message)) for message in response.finished],
        errors=[(message.slot, error_from_proto(message.error)) for message in response.errors],
        draining=response.draining,
    )


def _progress_from_proto(message: diffusion_pb2.DiffusionProgress) -> Progress:
    return Progress(
        queue_position=message.queue_position,
        output=message.output,
        step=message.step,
        steps=message.steps,
        elapsed_s=seconds(message.elapsed),
        preview=message.preview,
    )


def _finished_from_proto(message: diffusion_pb2.DiffusionFinished) -> Finished:
    formats = {known_format.value: known_format for known_format in FileFormat}
    settings, usage = message.settings, message.usage
    return Finished(
        request_id=message.request_id,
        settings=DiffusionSettings(
            frames=settings.frames,
            fps=settings.fps,
            strength=optional(settings, "strength"),
            **{name: getattr(settings, name) for name in _SETTINGS},
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
        steps=usage.steps,
        pixel_steps=usage.pixel_steps,
        prompt_tokens=usage.prompt_tokens,
        queued_s=seconds(usage.queued),
        running_s=seconds(usage.running),
    )


# ---- what a worker makes -------------------------------------------------------------------------


def diffusion_model_to_proto(info: DiffuserInfo) -> worker_pb2.DiffusionModelInfo:
    """Convert the facts and limits of a worker's engine."""
    return worker_pb2.DiffusionModelInfo(
        images=Kind.IMAGE in info.kinds,
        videos=Kind.VIDEO in info.kinds,
        schedulers=info.schedulers,
        **{name: getattr(info, name) for name in _MODEL_FIELDS},
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
        **{name: getattr(message, name) for name in _MODEL_FIELDS},
        **{name: getattr(info, name) for name in ENGINE_FIELDS},
    )
