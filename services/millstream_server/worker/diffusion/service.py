"""The plan of a worker that makes images or videos."""

from __future__ import annotations

from millstream.v1 import diffusion_pb2_grpc
from millstream_server.engines.base import Role
from millstream_server.protobuf.worker import description_to_proto
from millstream_server.runtime.rpc.channel import MAX_WORKER_MESSAGE_BYTES
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.synthesis.diffuser import DiffuserInfo
from millstream_server.worker.diffusion.core import DiffusionWorker
from millstream_server.worker.diffusion.engine import HostedDiffuser
from millstream_server.worker.diffusion.servicer import SERVICE, STREAMS, DiffusionServicer
from millstream_server.worker.host import WorkerHost, WorkerPlan
from millstream_server.worker.open_requests import Counted

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
        servicer = DiffusionServicer(worker, engine.options.kind)
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
