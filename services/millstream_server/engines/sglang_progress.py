"""How far each of SGLang's data-parallel ranks has come: evidence that it is alive."""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Mapping
from typing import Any


class RankProgress:
    """Counts what ranks get done; see `engines.base.Probeable.progress`.

    Two sources, since a long prompt gives no output while its chunks are prefilled: the chunks of
    output that arrive here, and the prompt tokens that schedulers count in their load snapshots.
    """

    def __init__(self) -> None:
        """Count from nothing."""
        self._outputs: Counter[int] = Counter()
        self._prefilled: dict[int, int] = {}
        self._reader: Any = None

    def read_loads_from(self, reader: Any) -> None:
        """Use SGLang's reader of load snapshots; to be called once the schedulers are up."""
        reader.read(0)  # opens the file, which waits for writers, while none hangs
        self._reader = reader

    def note(self, raw: Mapping[str, Any]) -> None:
        """Count a chunk that holds tokens; others may be made without the scheduler."""
        if raw["output_ids"]:
            self._outputs[raw["meta_info"].get("dp_rank") or 0] += 1

    def of(self, dp_rank: int) -> int:
        """Give a rank's number."""
        self._read(dp_rank)
        return self._outputs[dp_rank] + self._prefilled.get(dp_rank, 0)

    def _read(self, dp_rank: int) -> None:
        """Read the rank's snapshot, unless a writer holds the file."""
        descriptor = getattr(self._reader, "fd", None)
        # None: not a file; several nodes send theirs over a socket.
        if descriptor is None or not lock_to_read(descriptor):
            return
        load = self._reader.read(dp_rank)  # takes the lock that we hold, and gives it back
        if load is not None:
            self._prefilled[dp_rank] = int(load.total_prefill_uncached_tokens)


def lock_to_read(descriptor: int) -> bool:
    """Lock a file of load snapshots, unless a scheduler holds it: it may hang in there for good.

    SGLang's own reading would wait for that, and our event loop with it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
