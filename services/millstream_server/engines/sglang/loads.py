"""How busy SGLang's schedulers are, from the load snapshots they write to a file."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any

from millstream_server.engines.base import EngineLoad, RankLoad
from millstream_server.engines.sglang.progress import lock_to_read

_WAKE_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """How a KV cache is divided."""

    size: int
    """Tokens of a block."""
    total: int
    """Of all data-parallel ranks."""


class LoadReader:
    """Reads snapshots; a prefix that is only cached is not in use."""

    def __init__(self) -> None:
        """Start without any."""
        self._last: list[Any] = []

    async def read(
        self, manager: Any, blocks: KvBlocks, *, open_requests: int, may_wake: bool = True
    ) -> EngineLoad:
        """Join the schedulers' last snapshots; ``open_requests`` are on their way or there.

        Without ``may_wake`` the schedulers aren't asked anything, since an operation is under way.
        """
        loads = self._snapshots(manager.load_snapshot_reader)
        busy = any(load.num_used_tokens or load.num_running_reqs for load in loads)
        if busy and may_wake and not open_requests:
            # An idle scheduler may sleep for a second on an old report: asking wakes it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAKE_LIMIT_S):
                    await manager.get_internal_state()
            loads = self._snapshots(manager.load_snapshot_reader)
        return _joined(loads, blocks, open_requests)

    def _snapshots(self, reader: Any) -> list[Any]:
        """Read anew, unless a scheduler hangs while it holds the file: then what was read last."""
        descriptor = getattr(reader, "fd", None)
        if descriptor is None or lock_to_read(descriptor):
            self._last = reader.read_all()  # takes the lock that we hold, and gives it back
        return self._last


def _joined(loads: list[Any], blocks: KvBlocks, open_requests: int) -> EngineLoad:
    """Sum up the ranks' loads, which are in their order."""
    each = KvBlocks(blocks.size, blocks.total // max(1, len(loads)))
    ranks = [_of_rank(load, each) for load in loads]
    running = sum(load.running_requests for load in ranks)
    queued = sum(load.queued_requests for load in ranks)
    # Those on their way to a scheduler are in no snapshot yet.
    coming = max(0, open_requests - running - queued)
    if len(ranks) == 1:
        ranks = [replace(ranks[0], queued_requests=queued + coming)]
    return EngineLoad(
        running_requests=running,
        # With several ranks above their sum: where those on their way go isn't known.
        queued_requests=queued + coming,
        used_blocks=sum(load.used_blocks for load in ranks),
        total_blocks=blocks.total,
        ranks=tuple(ranks),
    )


def _of_rank(load: Any, blocks: KvBlocks) -> RankLoad:
    running, queued = int(load.num_running_reqs), int(load.num_waiting_reqs)
    if load.disaggregation is not None:
        running += int(load.disaggregation.prefill_inflight_queue_reqs)
    if load.queues is not None:
        queued += int(load.queues.grammar)
    return RankLoad(
        running_requests=running,
        queued_requests=queued,
        queued_tokens=int(load.num_waiting_uncached_tokens),
        used_blocks=math.ceil(int(load.num_used_tokens) / blocks.size),
        total_blocks=blocks.total,
    )
