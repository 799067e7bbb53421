"""The order in which requests wait for capacity."""

from __future__ import annotations

import enum


class Priority(enum.IntEnum):
    """Higher values go first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
