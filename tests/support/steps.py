"""Counts steps: what a reader does, whatever the machine does besides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(work: Callable[[], object], most: int) -> int:
    """Return how many calls ``work`` makes; fail as soon as they are more than ``most``."""
    count = 0

    def count_call(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        if event in {"call", "c_call"}:
            count += 1
            assert count <= most, f"more than {most} steps"

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
