"""Counts steps: what a reader does, whatever the machine does besides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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


def reach(work: Callable[[], object]) -> int:
    """Count the characters that are before each step of ``work``: it may look at all of them.

    A step is a call of a function with a ``text`` that it reads from the place ``at``.
    """
    count = 0

    def count_text(frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        if event == "call" and "text" in frame.f_code.co_varnames[: frame.f_code.co_argcount]:
            given = frame.f_locals
            count += len(given["text"]) - (given.get("at") or 0)

    before = sys.getprofile()
    sys.setprofile(count_text)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


class Watched(list[int]):
    """Token ids that count how many of them are looked at."""

    seen = 0

    def __iter__(self) -> Iterator[int]:
        self.seen += len(self)
        return super().__iter__()

    def count(self, value: int) -> int:
        self.seen += len(self)
        return super().count(value)
