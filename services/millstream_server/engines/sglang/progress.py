"""Progress of each of SGLang's data-parallel ranks, for the canary."""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Mapping
from typing import Any


class RankProgress:
    """Counts each rank's progress; see `engines.base.Probeable.progress`.

    From two sources, since a long prompt has no output while its chunks are prefilled: chunks of
    output received here, and the prompt tokens in the schedulers' load snapshots.
    """

    def __init__(self) -> None:
        """Start at 0."""
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
        """Count a result that came from a rank."""
        self._outputs[dp_rank] += 1

    def of(self, dp_rank: int) -> int:
        """Return a rank's number."""
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
