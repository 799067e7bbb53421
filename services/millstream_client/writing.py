"""Writes to a stream that the server may end meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import grpc

from millstream.v1 import processor_pb2
from millstream_client.request import is_task_cancelled
from millstream_client.uploads import Upload


async def write(call: Any, message: processor_pb2.ChatRequest) -> bool:
    """Send a message, when the server has room for it; return whether the stream was still open.

    If it wasn't, reading raises the status.
    """
    return await _unless_ended(call, call.write(message))


async def write_uploads(call: Any, uploads: Iterable[Upload]) -> bool:
    """Send files in chunks; return whether the stream was still open."""
    for upload in uploads:
        for chunk in upload.chunks():
            if not await write(call, chunk):
                return False
    return True


async def half_close(call: Any) -> bool:
    """Close our side of the stream; return whether it was still open."""
    return await _unless_ended(call, call.done_writing())


async def _unless_ended(call: Any, work: Coroutine[Any, Any, None]) -> bool:
    if call.done():
        work.close()
        return False
    writing = asyncio.ensure_future(work)
    # Otherwise grpc.aio's write never ends if its call is cancelled before it is connected, and
    # if the server ends the call, replaces its status by INTERNAL (grpc issue 36066).
    call.add_done_callback(lambda _: writing.cancel())
    try:
        await writing
    except (asyncio.InvalidStateError, grpc.RpcError, asyncio.CancelledError) as error:
        if is_task_cancelled(error):
            raise
        return False
    return True
