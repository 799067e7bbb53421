"""What a worker tells of its prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from millstream.v1 import kv_events_pb2, worker_pb2_grpc
from millstream_server.kv_cache.hashing import block_hashes

_LIMIT_S = 10


async def told(address: str, token_ids: Sequence[int], block_size: int) -> None:
    """Wait until a worker has told that the blocks of a prompt are cached."""
    missing = set(block_hashes(token_ids, block_size))
    request = kv_events_pb2.WatchKvEventsRequest()
    async with asyncio.timeout(_LIMIT_S), grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        async for response in stub.WatchKvEvents(request):
            stored = [*response.snapshot.stored, *(e.stored for e in response.events.events)]
            missing -= {each for blocks in stored for each in blocks.hashes}
            if not missing:
                return
