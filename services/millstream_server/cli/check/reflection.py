"""Lists a server's services."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from millstream_client import Client
from millstream_client.errors import from_rpc_error

_METHOD = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


class ReflectionMissingError(Exception):
    """The package with reflection's messages isn't installed."""


async def list_services(client: Client, timeout_s: float) -> frozenset[str]:
    """Return the full names of all services.

    Raises:
        ReflectionMissingError: the package isn't installed.
        MillstreamError: the call failed.
    """
    try:
        from grpc_reflection.v1alpha import reflection_pb2 as pb  # noqa: PLC0415 - a lean install
    except ModuleNotFoundError as error:
        raise ReflectionMissingError from error
    # v1 has the messages of v1alpha.
    method: Any = client.channel.stream_stream(
        _METHOD,
        pb.ServerReflectionRequest.SerializeToString,
        pb.ServerReflectionResponse.FromString,
    )
    call = method(
        iter([pb.ServerReflectionRequest(list_services="")]),
        metadata=client.metadata(),
        timeout=timeout_s,
    )
    try:
        async for reply in call:
            return frozenset(s.name for s in reply.list_services_response.service)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        call.cancel()
        raise
    return frozenset()
