"""WatchKvEvents: what the prefix caches hold, and how it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from millstream.v1 import kv_events_pb2, worker_pb2
from millstream_server.protobuf.kv_events import kv_message_to_proto, kv_position_from_proto
from millstream_server.runtime.errors import (
    FieldViolation,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from millstream_server.worker.kv_events.log import KvEventLog, LogReader

_MAX_REQUEST_BYTES = 256 << 10
"""The request is held as long as the stream; the positions of 4,096 ranks take 160 KiB."""


async def watch_kv_events(
    log: KvEventLog | None,
    info: worker_pb2.WorkerInfo,
    request: kv_events_pb2.WatchKvEventsRequest,
) -> AsyncGenerator[kv_events_pb2.WatchKvEventsResponse, None]:
    """Send each rank's log from the caller's position on, one message of a rank after another's.

    While the caller doesn't read, only the message that is being written is held for it: all that
    changes meanwhile is in the next one.

    Raises:
        UnsupportedFeatureError: there are no KV events.
        InvalidRequestError: a rank is not this worker's, or the request is too large.
    """
    if log is None or not info.block_hashing:
        raise UnsupportedFeatureError(
            "this worker has no KV events: its WorkerInfo.block_hashing is not set"
        )
    if (nbytes := request.ByteSize()) > _MAX_REQUEST_BYTES:
        raise InvalidRequestError.of(
            "positions", f"the request has {nbytes} bytes; {_MAX_REQUEST_BYTES} are allowed"
        )
    ranks = [log.rank(dp_rank) for dp_rank in _ranks(info, request)]
    positions = {message.dp_rank: kv_position_from_proto(message) for message in request.positions}
    changed = asyncio.Event()
    forget = [rank.listen(changed.set) for rank in ranks]
    readers = [LogReader(rank, positions.get(rank.dp_rank)) for rank in ranks]
    try:
        while True:
            changed.clear()
            idle = True
            for reader in readers:
                if (message := reader.read()) is not None:
                    idle = False
                    yield kv_message_to_proto(message)
            if idle:
                await changed.wait()
    finally:
        for undo in forget:
            undo()
        for reader in readers:
            reader.close()


def _ranks(info: worker_pb2.WorkerInfo, request: kv_events_pb2.WatchKvEventsRequest) -> list[int]:
    """Return the ranks to follow, each once.

    Positions of other ranks are not refused: before a restart the worker may have had more ranks.
    """
    own = range(info.dp_start, info.dp_start + info.dp_size)
    wrong = [
        FieldViolation(
            f"dp_ranks[{index}]", f"this worker has the ranks {own[0]} to {own[-1]}, not {dp_rank}"
        )
        for index, dp_rank in enumerate(request.dp_ranks)
        if dp_rank not in own
    ]
    if wrong:
        raise InvalidRequestError.of_all(wrong[:8])
    return sorted(set(request.dp_ranks)) or list(own)
