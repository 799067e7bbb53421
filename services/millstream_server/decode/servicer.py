"""gRPC face of decode: one long-lived stream per Processor, many requests on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from millstream.v1 import decode_pb2, decode_pb2_grpc
from millstream_server.worker_stream.server import Generator, WorkerSession


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves DecodeService from one engine."""

    def __init__(self, generator: Generator) -> None:
        """Run requests on ``generator``."""
        self._generator = generator

    async def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """Run one stream's requests; see generation.proto for the rules."""
        async for frame in WorkerSession(self._generator).frames(request_iterator):
            yield decode_pb2.DecodeResponse(frame=frame)
