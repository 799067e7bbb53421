"""A worker without the RPCs of WorkerService that a worker may leave out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from millstream.v1 import worker_pb2_grpc


class WorkerWithoutOptionalRpcs(worker_pb2_grpc.WorkerServiceServicer):
    """The methods that it doesn't have; a test adds the others."""

    async def WatchKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not served here")
        yield

    async def WatchLoadProgress(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not served here")
        yield
