"""How long a refused client should wait before it tries again."""

from __future__ import annotations

import random

_MIN_S, _MAX_S = 0.1, 30.0
_JITTER = 0.2


def jittered(delay_s: float) -> float:
    """Bound a delay to 0.1 to 30 s and vary it by 20 %, so that clients don't all retry at once."""
    bounded = min(max(delay_s, _MIN_S), _MAX_S)
    return bounded * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret
