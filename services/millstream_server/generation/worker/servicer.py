"""The services that generate text: one long-lived stream per Processor, with many requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from millstream.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    diffusion_pb2,
    diffusion_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from millstream_server.generation.worker.session import RequestRunner, WorkerSession
from millstream_server.runtime.errors import UnsupportedMethodError
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.serving import ServicerTable


@dataclass(frozen=True, slots=True)
class GenerationService:
    """A gRPC service for requests: `PREFILL`, `DECODE` or `DIFFUSION`."""

    name: str
    """Full proto name."""
    stream: str
    """Name of its method."""
    servicer: Callable[[RequestRunner], Any]
    add_to_server: Callable[[Any, Any], None]
    """The generated function for it."""

    def add(self, runner: RequestRunner, server: ServicerTable) -> None:
        self.add_to_server(self.servicer(runner), server)


class _Servicer:
    """Serves one engine; see generation.proto for the rules of its streams."""

    def __init__(self, runner: RequestRunner) -> None:
        self._runner = runner


class PrefillServicer(_Servicer, prefill_pb2_grpc.PrefillServiceServicer):
    """Serves PrefillService."""

    def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], call: Call
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        return WorkerSession(self._runner, prefill_pb2.PrefillResponse).responses(request_iterator)


class DecodeServicer(_Servicer, decode_pb2_grpc.DecodeServiceServicer):
    """Serves DecodeService."""

    def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], call: Call
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        return WorkerSession(self._runner, decode_pb2.DecodeResponse).responses(request_iterator)


class TextDiffusionServicer(_Servicer, diffusion_pb2_grpc.DiffusionServiceServicer):
    """Serves GenerateText; other kinds of workers serve the service's other methods."""

    def GenerateText(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateTextRequest], call: Call
    ) -> AsyncGenerator[diffusion_pb2.GenerateTextResponse, None]:
        return WorkerSession(self._runner, diffusion_pb2.GenerateTextResponse).responses(
            request_iterator
        )

    async def GenerateImage(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateImageRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateImageResponse]:
        raise _other_kind("images", "image")
        yield

    async def GenerateVideo(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateVideoRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateVideoResponse]:
        raise _other_kind("videos", "video")
        yield


def _other_kind(what: str, kind: str) -> UnsupportedMethodError:
    return UnsupportedMethodError(
        f"this worker makes text, no {what}; a diffusion worker with --kind {kind} makes them"
    )


PREFILL = GenerationService(
    "millstream.v1.PrefillService",
    "Prefill",
    PrefillServicer,
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
)
DECODE = GenerationService(
    "millstream.v1.DecodeService",
    "Decode",
    DecodeServicer,
    decode_pb2_grpc.add_DecodeServiceServicer_to_server,
)
DIFFUSION = GenerationService(
    "millstream.v1.DiffusionService",
    "GenerateText",
    TextDiffusionServicer,
    diffusion_pb2_grpc.add_DiffusionServiceServicer_to_server,
)
