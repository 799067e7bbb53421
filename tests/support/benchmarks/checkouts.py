"""Compare services of this checkout with those of another: same clients, same minutes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path


def environment_of(checkout: Path | None) -> Mapping[str, str]:
    """Make services come from another checkout; None is this one."""
    if checkout is None:
        return {}
    roots = [checkout / part for part in ("services", "generated/python")]
    return {"PYTHONPATH": ":".join(str(root.resolve(strict=True)) for root in roots)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Sum figures of several rounds up."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}
