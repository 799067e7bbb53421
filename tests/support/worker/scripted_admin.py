"""An admin port whose services say what a test tells them, and `millstream admin` that calls it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from millstream.v1 import admin_pb2, admin_pb2_grpc, engine_control_pb2, engine_control_pb2_grpc
from millstream_server.cli.entry import run_plain
from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.security.api_keys import ApiKeys

ENGINE = engine_control_pb2.DESCRIPTOR.services_by_name["EngineControlService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
DONE = {"stage": "OPERATION_STAGE_DONE", "elapsed": "1.25s"}
Script = Sequence[dict[str, Any]] | ServingError


@dataclass
class Control:
    """Both services of an admin port; each method returns what the script says."""

    script: dict[str, Script] = field(default_factory=dict)
    """Responses in JSON's form by the method's name; or the error it ends with."""
    received: list[Message] = field(default_factory=list)
    wants: int | None = None
    """Requests that are read of a stream before the response; None: all."""
    address: str = ""

    def __getattr__(self, name: str) -> Callable[[Any, Any], Any]:
        if not name[0].isupper():
            raise AttributeError(name)
        method = ENGINE.methods_by_name.get(name) or ADMIN.methods_by_name[name]

        async def stream(request: Any, _: Any) -> AsyncIterator[Message]:
            await self._take(request)
            for response in self._responses(method):
                yield response

        async def one(request: Any, _: Any) -> Message:
            self.received.append(request)
            (response,) = self._responses(method)
            return response

        return stream if name in ("Drain", "ReleaseMemory", "UpdateWeights") else one

    async def _take(self, request: Any) -> None:
        if isinstance(request, Message):
            self.received.append(request)
            return
        if self.wants == 0:
            return
        async for message in request:
            self.received.append(message)
            if len(self.received) == self.wants:
                return

    def _responses(self, method: Any) -> list[Message]:
        script = self.script[method.name]
        if isinstance(script, ServingError):
            raise script
        kind = getattr(
            admin_pb2 if method.containing_service is ADMIN else engine_control_pb2,
            method.output_type.name,
        )
        return [json_format.ParseDict(fields, kind()) for fields in script]


@contextlib.asynccontextmanager
async def control(key: str = "", /, **script: Script) -> AsyncIterator[Control]:
    """Serve; callers need the ``key``, if there is one."""
    served = Control(script)
    auth = AuthPolicy(keys=ApiKeys(inline=f"up:{key}") if key else None)
    server = Server(
        (ENGINE.full_name, ADMIN.full_name), ServerOptions(max_receive_bytes=4 << 20, auth=auth)
    )
    engine_control_pb2_grpc.add_EngineControlServiceServicer_to_server(served, server.methods)  # type: ignore[arg-type]
    admin_pb2_grpc.add_AdminServiceServicer_to_server(served, server.methods)  # type: ignore[arg-type]
    served.address = f"127.0.0.1:{await server.listen('127.0.0.1:0')}"
    try:
        yield served
    finally:
        await server.stop(0)


async def admin(*args: str) -> int:
    """Run the command; its event loop is another thread's."""
    return await asyncio.to_thread(run_plain, ["admin", *args])
