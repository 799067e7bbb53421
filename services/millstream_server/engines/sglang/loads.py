"""How busy SGLang's schedulers are and how far they have come, from the snapshots they write."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream_server.control.engine import EngineLoad, RankLoad


class RankProgress:
    """Counts each rank's progress; see `control.engine.Probeable.progress`.

    From two sources, since a long prompt has no output while its chunks are prefilled: chunks of
    output received here, and the prompt tokens in the schedulers' load snapshots.
    """

    def __init__(self) -> None:
        self._outputs: Counter[int] = Counter()
        self._prefilled: dict[int, int] = {}
        self._reader: Any = None

    def read_loads_from(self, reader: Any) -> None:
        """Use SGLang's reader of load snapshots; to be called once the schedulers are up."""
        reader.read(0)  # opens the file, which waits for writers: must be done while none hangs
        self._reader = reader

    def note(self, raw: Mapping[str, Any]) -> None:
        """Count a chunk that has tokens; others may come without the scheduler."""
        if raw["output_ids"]:
            self._outputs[raw["meta_info"].get("dp_rank") or 0] += 1

    def note_result(self, dp_rank: int) -> None:
        self._outputs[dp_rank] += 1

    def of(self, dp_rank: int) -> int:
        self._read(dp_rank)
        return self._outputs[dp_rank] + self._prefilled.get(dp_rank, 0)

    def _read(self, dp_rank: int) -> None:
        """Read the rank's snapshot, unless a writer holds the file's lock."""
        descriptor = getattr(self._reader, "fd", None)
        # None: no file, since with several nodes snapshots are sent over a socket.
        if descriptor is None or not lock_to_read(descriptor):
            return
        # It locks the file, which we have locked already, and unlocks it.
        load = self._reader.read(dp_rank)
        if load is not None:
            self._prefilled[dp_rank] = int(load.total_prefill_uncached_tokens)


def lock_to_read(descriptor: int) -> bool:
    """Lock a file of load snapshots; return False if a scheduler holds the lock.

    A hung scheduler may hold it for ever: SGLang's own read would then block our event loop.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


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
    return EngineLoad.of_ranks(ranks, open_requests=open_requests, total_blocks=blocks.total)


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
