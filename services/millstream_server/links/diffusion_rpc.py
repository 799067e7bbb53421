"""Images and videos on a link: what `SlotStream` needs of their RPCs."""

from __future__ import annotations

from typing import Any

import grpc

from millstream.v1 import diffusion_pb2, diffusion_pb2_grpc
from millstream_server.links.slot_stream import SlotCall
from millstream_server.protobuf.diffusion import (
    Content,
    content_from_proto,
    image_to_proto,
    video_to_proto,
)
from millstream_server.synthesis.output import Chunk, Finished, Progress
from millstream_server.synthesis.request import DiffusionRequest, Kind

DiffusionCall = SlotCall[Progress | Chunk, Finished]

_METHODS = {Kind.IMAGE: "GenerateImage", Kind.VIDEO: "GenerateVideo"}
_REQUESTS = {
    Kind.IMAGE: diffusion_pb2.GenerateImageRequest,
    Kind.VIDEO: diffusion_pb2.GenerateVideoRequest,
}
_STARTS = {Kind.IMAGE: image_to_proto, Kind.VIDEO: video_to_proto}

_ENTRY_BYTES = 512
"""Of an entry without its content."""


class DiffusionRpc:
    """The `SlotRpc` of one kind of output."""

    def __init__(self, kind: Kind) -> None:
        """Make outputs of ``kind``."""
        self._kind = kind

    @property
    def method(self) -> str:
        """See `SlotRpc.method`."""
        return f"millstream.v1.DiffusionService/{_METHODS[self._kind]}"

    def open(self, channel: grpc.aio.Channel) -> Any:
        """See `SlotRpc.open`."""
        return getattr(diffusion_pb2_grpc.DiffusionServiceStub(channel), _METHODS[self._kind])()

    def start(self, slot: int, request: DiffusionRequest) -> Any:
        """See `SlotRpc.start`."""
        return _STARTS[self._kind](slot, request)

    def cancel(self, slot: int) -> Any:
        """See `SlotRpc.cancel`."""
        return _REQUESTS[self._kind](cancel=diffusion_pb2.CancelDiffusion(slot=slot))

    def nbytes(self, entry: Progress | Chunk) -> int:
        """See `SlotRpc.nbytes`."""
        return _ENTRY_BYTES + len(entry.preview if isinstance(entry, Progress) else entry.data)

    def content(self, response: Any) -> Content:
        """See `SlotRpc.content`."""
        return content_from_proto(response)
