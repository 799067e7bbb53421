"""DiffusionService of a worker that makes images or videos: its streams, and the worker's plan."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from millstream.v1 import diffusion_pb2, diffusion_pb2_grpc
from millstream_server.control.engine import Role
from millstream_server.diffusion.diffuser import DiffuserInfo
from millstream_server.diffusion.request import Kind
from millstream_server.diffusion.wire import (
    image_from_proto,
    image_response,
    video_from_proto,
    video_response,
)
from millstream_server.diffusion.worker.core import DiffusionWorker
from millstream_server.diffusion.worker.engine import HostedDiffuser
from millstream_server.protobuf.common import SlotCalls
from millstream_server.runtime.errors import UnsupportedMethodError
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.channel import MAX_WORKER_MESSAGE_BYTES
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.runtime.rpc.slot_session import SlotSession
from millstream_server.worker.host import WorkerHost, WorkerPlan
from millstream_server.worker.open_requests import Counted
from millstream_server.worker_info import description_to_proto

SERVICE = "millstream.v1.DiffusionService"
STREAMS = (f"{SERVICE}/GenerateImage", f"{SERVICE}/GenerateVideo")


class MediaDiffusionServicer(diffusion_pb2_grpc.DiffusionServiceServicer):
    """Serves one of GenerateImage and GenerateVideo; other workers serve the other methods."""

    def __init__(self, worker: DiffusionWorker, kind: Kind) -> None:
        self._kind = kind
        calls = partial(SlotCalls, worker.work, worker.streams, worker.run)
        self._images = calls(image_from_proto, image_response)
        self._videos = calls(video_from_proto, video_response)

    async def GenerateText(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateTextRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateTextResponse]:
        self._refuse("text", "text")
        yield diffusion_pb2.GenerateTextResponse()

    def GenerateImage(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateImageRequest], call: Call
    ) -> AsyncGenerator[diffusion_pb2.GenerateImageResponse, None]:
        if self._kind is not Kind.IMAGE:
            self._refuse("images", "image")
        return SlotSession(self._images).responses(request_iterator)

    def GenerateVideo(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateVideoRequest], call: Call
    ) -> AsyncGenerator[diffusion_pb2.GenerateVideoResponse, None]:
        if self._kind is not Kind.VIDEO:
            self._refuse("videos", "video")
        return SlotSession(self._videos).responses(request_iterator)

    def _refuse(self, what: str, kind: str) -> None:
        raise UnsupportedMethodError(
            f"this worker makes {self._kind.value}s, no {what}; a diffusion worker with --kind "
            f"{kind} makes them"
        )


_DEFAULT_TIMES = 64
"""Default limit on what is open: this many requests that set nothing."""
_MESSAGE_OVERHEAD = 1 << 20
PIXEL_STEPS = Counted("pixel steps (pixels x frames x steps x outputs)", "pixel_steps")


def make_plan(
    engine: HostedDiffuser, model: str, *, max_open_pixel_steps: int = 0
) -> WorkerPlan[DiffuserInfo]:
    """Make the plan of a worker of the role DIFFUSION.

    ``max_open_pixel_steps`` 0: as many as 64 requests have that set nothing.
    """

    def add(host: WorkerHost[DiffuserInfo], server: ServicerTable) -> None:
        worker = DiffusionWorker(engine, host.requests, host.streams, model)
        servicer = MediaDiffusionServicer(worker, engine.options.kind)
        diffusion_pb2_grpc.add_DiffusionServiceServicer_to_server(servicer, server)

    def most_open(info: DiffuserInfo) -> int:
        pixels = info.default_width * info.default_height * max(1, info.default_frames)
        return max_open_pixel_steps or _DEFAULT_TIMES * pixels * info.default_steps

    return WorkerPlan(
        engine=engine,
        role=Role.DIFFUSION,
        model=model,
        operation=f"generate_{engine.options.kind.value}",
        services=(SERVICE,),
        add=add,
        describe=description_to_proto,
        max_open_tokens=most_open,
        counted=PIXEL_STEPS,
        # A file above the limit fails as one request, not with the whole stream.
        max_receive_bytes=max(
            MAX_WORKER_MESSAGE_BYTES, engine.options.max_input_bytes + _MESSAGE_OVERHEAD
        ),
        without_spans=STREAMS,
    )
