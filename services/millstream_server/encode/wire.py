"""Conversion of what an Encode stream carries.

What a message has that can't be read raises `InvalidRequestError`, with its field.
"""

from __future__ import annotations

from millstream.v1 import encode_pb2, worker_pb2
from millstream_server.encode.encoder import EncoderInfo
from millstream_server.media.items import MediaFile, MediaLimits
from millstream_server.protobuf.common import (
    ENGINE_FIELDS,
    deadline_of,
    duration,
    same_fields,
    seconds,
    trace_of,
    values,
    write_trace,
)
from millstream_server.protobuf.media import (
    CONTENTS,
    CONTENTS_TO_PROTO,
    MODALITIES,
    MODALITIES_TO_PROTO,
    modalities_from_proto,
    modalities_to_proto,
)
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.telemetry.trace_context import TraceContext

_LIMITS = same_fields(worker_pb2.EncoderInfo, MediaLimits)


def write_item(message: encode_pb2.EncodeItem, slot: int, file: MediaFile, *, inline: bool) -> None:
    """Write a start into an empty message; ``inline``: with the file's bytes."""
    message.slot = slot
    message.request_id = file.request_id
    message.modality = MODALITIES_TO_PROTO[file.modality]
    message.total_bytes = len(file.data)
    if inline:
        message.data = bytes(file.data)
    message.sha256 = file.sha256
    message.cache_salt = file.salt
    write_trace(message.trace, file.trace)
    if (left_s := file.time_left_s) is not None:
        message.timeout.FromNanoseconds(int(left_s * 1e9))


def file_from_proto(message: encode_pb2.EncodeItem, stream: TraceContext) -> MediaFile:
    """Convert a start; ``data`` is what the message has of the file, possibly nothing.

    ``stream`` is the trace of an item that has none of its own.
    """
    if message.modality not in MODALITIES:
        raise InvalidRequestError.of("modality", "is not one that this server knows")
    return MediaFile(
        modality=MODALITIES[message.modality],
        data=message.data,
        sha256=message.sha256,
        salt=message.cache_salt,
        request_id=message.request_id,
        trace=trace_of(message, stream),
        deadline_s=deadline_of(message),
    )


def encoder_to_proto(encoder: EncoderInfo) -> worker_pb2.EncoderInfo:
    """Convert what a worker encodes, and its limits."""
    limits = encoder.limits
    return worker_pb2.EncoderInfo(
        modalities=modalities_to_proto(encoder.modalities),
        max_item_tokens=encoder.max_item_tokens,
        content=CONTENTS_TO_PROTO[encoder.content],
        max_video=duration(limits.max_video_s),
        **values(limits, _LIMITS),
    )


def encoder_from_proto(info: worker_pb2.WorkerInfo) -> EncoderInfo | None:
    """Read `WorkerInfo.encoder`; None if nothing in it is known."""
    message = info.encoder
    modalities = modalities_from_proto(message.modalities)
    if not modalities or message.content not in CONTENTS:
        return None
    return EncoderInfo(
        modalities=modalities,
        content=CONTENTS[message.content],
        max_item_tokens=message.max_item_tokens,
        limits=MediaLimits(max_video_s=seconds(message.max_video), **values(message, _LIMITS)),
        **values(info, ENGINE_FIELDS),
    )
