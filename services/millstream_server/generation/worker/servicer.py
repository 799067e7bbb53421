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
    add: Callable[[RequestRunner, ServicerTable], None]
    """Adds its servicer."""


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves PrefillService from one engine."""

    def __init__(self, runner: RequestRunner) -> None:
        """Run requests on ``runner``."""
        self._runner = runner

    def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], call: Call
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Run one stream's requests; see generation.proto for the rules."""
        return WorkerSession(self._runner, prefill_pb2.PrefillResponse).responses(request_iterator)


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves DecodeService from one engine."""

    def __init__(self, runner: RequestRunner) -> None:
        """Run requests on ``runner``."""
        self._runner = runner

    def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], call: Call
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """Run one stream's requests; see generation.proto for the rules."""
        return WorkerSession(self._runner, decode_pb2.DecodeResponse).responses(request_iterator)


class TextDiffusionServicer(diffusion_pb2_grpc.DiffusionServiceServicer):
    """Serves GenerateText; other kinds of workers serve the service's other methods."""

    def __init__(self, runner: RequestRunner) -> None:
        """Run requests on ``runner``."""
        self._runner = runner

    def GenerateText(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateTextRequest], call: Call
    ) -> AsyncGenerator[diffusion_pb2.GenerateTextResponse, None]:
        """Run one stream's requests; see generation.proto for the rules."""
        return WorkerSession(self._runner, diffusion_pb2.GenerateTextResponse).responses(
            request_iterator
        )

    async def GenerateImage(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateImageRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateImageResponse]:
        """Refuse: another kind of worker makes images."""
        raise _other_kind("images", "image")
        yield

    async def GenerateVideo(
        self, request_iterator: AsyncIterator[diffusion_pb2.GenerateVideoRequest], call: Call
    ) -> AsyncIterator[diffusion_pb2.GenerateVideoResponse]:
        """Refuse: another kind of worker makes videos."""
        raise _other_kind("videos", "video")
        yield


def _other_kind(what: str, kind: str) -> UnsupportedMethodError:
    return UnsupportedMethodError(
        f"this worker makes text, no {what}; a diffusion worker with --kind {kind} makes them"
    )


def _add_prefill(runner: RequestRunner, server: Any) -> None:
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(runner), server)


def _add_decode(runner: RequestRunner, server: Any) -> None:
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(runner), server)


def _add_diffusion(runner: RequestRunner, server: Any) -> None:
    servicer = TextDiffusionServicer(runner)
    diffusion_pb2_grpc.add_DiffusionServiceServicer_to_server(servicer, server)


PREFILL = GenerationService("millstream.v1.PrefillService", "Prefill", _add_prefill)
DECODE = GenerationService("millstream.v1.DecodeService", "Decode", _add_decode)
DIFFUSION = GenerationService("millstream.v1.DiffusionService", "GenerateText", _add_diffusion)
