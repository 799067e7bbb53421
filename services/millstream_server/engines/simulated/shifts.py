"""What weight versions and adapters do to the simulated engine's output.

Both change the step from one token to the next, so every token shows what made it:

    shift = zlib.crc32(name.encode()) % 97 + 1
    step = 1 + shift(weight version, unless it is the first) + shift(adapter, if there is one)
"""

from __future__ import annotations

import zlib


def version_shift(version: str, first: str = "") -> int:
    """Return what a weight version adds to the step; ``first``: the version at the start, 0."""
    return 0 if version == first else _shift(version)


def adapter_shift(adapter: str) -> int:
    """Return what an adapter adds to the step; 0 without one."""
    return _shift(adapter) if adapter else 0


def _shift(name: str) -> int:
    return zlib.crc32(name.encode()) % 97 + 1
