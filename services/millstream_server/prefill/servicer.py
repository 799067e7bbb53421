"""PrefillService: one long-lived stream per Processor, with many requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from millstream.v1 import prefill_pb2, prefill_pb2_grpc
from millstream_server.runtime.rpc.call import Call
from millstream_server.worker.generation.app import GenerationService
from millstream_server.worker.generation.session import RequestRunner, WorkerSession


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


def _add(runner: RequestRunner, server: Any) -> None:
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(runner), server)


SERVICE = GenerationService("millstream.v1.PrefillService", "Prefill", _add)
