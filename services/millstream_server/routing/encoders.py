"""Which worker encodes an image or a video.

The same file goes to the same worker, where its embedding is cached, unless that worker is clearly
busier than another. Rendezvous hashing: D. Thaler, C. Ravishankar, "A name-based mapping scheme for
rendezvous" (1996).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from millstream_server.routing.policy import AFFINITY_SLACK, requests_at
from millstream_server.routing.workers import WorkerView


def pick_encoder(
    sha256: bytes, views: Sequence[WorkerView], avoid: Collection[str] = ()
) -> WorkerView | None:
    """Pick the worker for a file, by its hash; None if ``avoid`` leaves none."""
    views = [view for view in views if view.address not in avoid]
    if not views:
        return None
    least = min(requests_at(view) for view in views)
    free = [view for view in views if requests_at(view) <= least + AFFINITY_SLACK]
    return max(free, key=lambda view: _rank(sha256, view.address))


def _rank(sha256: bytes, address: str) -> bytes:
    return hashlib.blake2b(sha256 + address.encode(), digest_size=8).digest()
