"""What a check of this machine found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """How bad it is."""

    OK = 0
    WARN = 1
    """Works, or isn't needed by everyone."""
    MISS = 2
    """The default suite won't run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``next_step`` is what to do about it."""

    level: Level
    what: str
    next_step: str = ""


def ok(what: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, what)


def warn(what: str, next_step: str) -> Finding:
    """It may do."""
    return Finding(Level.WARN, what, next_step)


def miss(what: str, next_step: str) -> Finding:
    """It won't do."""
    return Finding(Level.MISS, what, next_step)
