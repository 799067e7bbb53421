"""Why a worker isn't serving: the conditions that its admin port tells."""

from __future__ import annotations

import asyncio

import grpc

from millstream.v1 import admin_pb2, admin_pb2_grpc
from millstream_client import Client
from millstream_server.cli.top.state import Reach, WorkerState

_CALL_S = 2.0
_LOOK_S = 0.1


async def follow_conditions(state: WorkerState, admin: Client, interval_s: float) -> None:
    """Keep `WorkerState.conditions` current while the worker isn't serving; until cancelled."""
    async with admin:
        stub = admin_pb2_grpc.AdminServiceStub(admin.channel)
        while True:
            if state.reach is not Reach.REACHED or state.serving is not False:
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                response = await stub.GetServerStatus(
                    admin_pb2.GetServerStatusRequest(),
                    timeout=_CALL_S,
                    metadata=admin.metadata(),
                )
            except grpc.aio.AioRpcError:
                state.conditions = ()  # the table shows that it isn't serving
            else:
                state.conditions = tuple(response.status.health_conditions)
            await asyncio.sleep(interval_s)
