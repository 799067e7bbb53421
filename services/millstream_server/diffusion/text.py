"""DiffusionService.GenerateText from one engine, and the process that serves it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from millstream.v1 import diffusion_pb2, diffusion_pb2_grpc
from millstream_server.diffusion.text_settings import TextDiffusionSettings
from millstream_server.engines.base import Role
from millstream_server.runtime.errors import UnsupportedMethodError
from millstream_server.runtime.rpc.call import Call
from millstream_server.worker.generation import app
from millstream_server.worker.generation.session import RequestRunner, WorkerSession


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


def _add(runner: RequestRunner, server: Any) -> None:
    servicer = TextDiffusionServicer(runner)
    diffusion_pb2_grpc.add_DiffusionServiceServicer_to_server(servicer, server)


SERVICE = app.GenerationService("millstream.v1.DiffusionService", "GenerateText", _add)


async def run(settings: TextDiffusionSettings) -> int:
    """Run a worker that makes text by diffusion; return the process's exit code.

    Raises:
        SettingsError: settings contradict each other.
    """
    return await app.run(settings, Role.DIFFUSION, SERVICE, dllm=settings.dllm)
