"""DecodeService: one long-lived stream per Processor, with many requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from millstream.v1 import decode_pb2, decode_pb2_grpc
from millstream_server.runtime.rpc.call import Call
from millstream_server.worker.generation.app import GenerationService
from millstream_server.worker.generation.session import RequestRunner, WorkerSession


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


def _add(runner: RequestRunner, server: Any) -> None:
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(runner), server)


SERVICE = GenerationService("millstream.v1.DecodeService", "Decode", _add)
