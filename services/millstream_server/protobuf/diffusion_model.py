"""Conversion of what a worker makes images or videos of, in its info."""

from __future__ import annotations

from millstream.v1 import worker_pb2
from millstream_server.protobuf.worker_info import ENGINE_FIELDS
from millstream_server.synthesis.diffuser import DiffuserInfo
from millstream_server.synthesis.request import Kind

_FIELDS = (
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


def diffusion_model_to_proto(info: DiffuserInfo) -> worker_pb2.DiffusionModelInfo:
    """Convert the facts and limits of a worker's engine."""
    return worker_pb2.DiffusionModelInfo(
        images=Kind.IMAGE in info.kinds,
        videos=Kind.VIDEO in info.kinds,
        schedulers=info.schedulers,
        **{name: getattr(info, name) for name in _FIELDS},
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
        **{name: getattr(message, name) for name in _FIELDS},
        **{name: getattr(info, name) for name in ENGINE_FIELDS},
    )
