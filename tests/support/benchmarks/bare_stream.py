"""A grpc.aio server that sends back what it gets, and nothing else: what a stream costs at least.

python -m tests.support.benchmarks.bare_stream --listen 127.0.0.1:50051
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer


async def _echo(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


class _EveryMethod(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(_echo)


async def _serve(address: str) -> None:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    server.add_generic_rpc_handlers((_EveryMethod(),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[sys.argv.index("--listen") + 1]))
