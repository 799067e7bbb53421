"""gRPC face of prefill: one long-lived stream per Processor, many requests on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from millstream.v1 import prefill_pb2, prefill_pb2_grpc
from millstream_server.worker_stream.server import Generator, WorkerSession


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves PrefillService from one engine."""

    def __init__(self, generator: Generator) -> None:
        """Run requests on ``generator``."""
        self._generator = generator

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Run one stream's requests; see generation.proto for the rules."""
        async for frame in WorkerSession(self._generator).frames(request_iterator):
            yield prefill_pb2.PrefillResponse(frame=frame)
