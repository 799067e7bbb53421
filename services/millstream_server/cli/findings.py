"""Results of the checks of this machine."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """Severity of a finding."""

    OK = 0
    WARN = 1
    """It works, or isn't needed everywhere."""
    MISS = 2
    """The default suite won't run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``next_step`` is the advice."""

    level: Level
    what: str
    next_step: str = ""


def ok(what: str) -> Finding:
    """Make a finding without a problem."""
    return Finding(Level.OK, what)


def warn(what: str, next_step: str) -> Finding:
    """Make a warning."""
    return Finding(Level.WARN, what, next_step)


def miss(what: str, next_step: str) -> Finding:
    """Make a finding that something needed is missing."""
    return Finding(Level.MISS, what, next_step)
