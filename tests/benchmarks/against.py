"""Says whether this checkout costs more than another one, BASE: what `--against BASE` does.

A benchmark has rows, each a function that measures a checkout's code with this checkout's client. A
round measures a row three times: BASE, BASE once more, and here, in an order that rotates with the
rounds. Of each figure, per row:

    here/base   the median over the rounds of here over BASE, each of one round
    base/base   how far BASE over itself is from 1: the median over the same rounds
    limit       the bound (--bound 1.02) plus base/base
    met         here/base is at most the limit

Before a round the machine must be quiet: over one second fewer than 0.5 cores may be busy, by
/proc/stat, with what the host took away. (The load average of a minute remembers the round before.)
Else it is looked at again, for ten minutes; --any-load measures at once, and says "noisy".

Exit code: 0 met; 1 a judged figure isn't; 2 nothing to judge, or the machine isn't quiet.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.benchmarks.verdict import progress

HERE = Path(__file__).parents[2]
"""This checkout."""
Figures = dict[str, float]
"""By name, with the unit in it; what a row doesn't measure is left out."""
_SIDES = ("base", "again", "here")
_ROUNDS = 7
_BOUND = 1.02
_QUIET_CORES, _LOOKS = 0.5, 600
_NOT_MET, _NOT_JUDGED = 1, 2


def environment_of(checkout: Path | None) -> Mapping[str, str]:
    """Make code come from a checkout; None is what the environment has."""
    if checkout is None:
        return {}
    roots = [checkout / part for part in ("services", "generated/python")]
    return {"PYTHONPATH": ":".join(str(root.resolve(strict=True)) for root in roots)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Sum figures of several rounds up."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def add_arguments(parser: argparse.ArgumentParser, *, figures: str, rounds: int = 1) -> None:
    """Add what all that compare have; ``figures``: patterns of those that are judged."""
    parser.add_argument("--against", type=Path, help="directory of another checkout to compare")
    parser.add_argument(
        "--rounds", type=int, help=f"how often all is measured ({rounds}; --against: {_ROUNDS})"
    )
    parser.add_argument("--bound", type=float, default=_BOUND, help=f"of here/base ({_BOUND})")
    parser.add_argument("--figures", default=figures, help=f"judged, as patterns ({figures})")
    parser.add_argument("--any-load", action="store_true", help="measure on a noisy machine, too")
    parser.set_defaults(own_rounds=rounds)


def rounds_of(arguments: argparse.Namespace) -> int:
    """Return how often all is measured."""
    return arguments.rounds or (_ROUNDS if arguments.against else arguments.own_rounds)


# ---- arithmetic ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One figure of one row; NaN where BASE's was always 0."""

    row: str
    figure: str
    base: float
    """The median; so is ``here``."""
    here: float
    ratio: float
    """The median of here over BASE."""
    deviation: float
    """The median distance from 1 of BASE over BASE."""
    limit: float | None
    """None: not judged."""
    noisy: bool = False

    @property
    def verdict(self) -> str:
        """Return `met`, `not met`, or nothing where it isn't judged."""
        if self.limit is None:
            return ""
        return "met" if self.ratio <= self.limit else "not met"


def order_of(turn: int) -> tuple[str, ...]:
    """Return the sides in the order of a round."""
    at = turn % len(_SIDES)
    return _SIDES[at:] + _SIDES[:at]


def compared(
    row: str, sides: Mapping[str, Sequence[Figures]], bound: float, judged: Sequence[str]
) -> list[Compared]:
    """Compare all figures that both checkouts have; ``judged`` are patterns of names."""
    base, again, here = (sides[side] for side in _SIDES)
    found = []
    for name in here[0].keys() & base[0].keys():
        deviation = _median(abs(ratio - 1) for ratio in _ratios(again, base, name))
        is_judged = any(fnmatch.fnmatchcase(name, pattern) for pattern in judged)
        found.append(
            Compared(
                row=row,
                figure=name,
                base=_median(figures[name] for figures in base),
                here=_median(figures[name] for figures in here),
                ratio=_median(_ratios(here, base, name)),
                deviation=deviation,
                limit=bound + deviation if is_judged else None,
            )
        )
    return sorted(found, key=lambda each: [*here[0]].index(each.figure))


def _ratios(some: Sequence[Figures], others: Sequence[Figures], name: str) -> list[float]:
    pairs = zip(some, others, strict=True)
    return [one[name] / other[name] for one, other in pairs if other[name]]


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.median(listed) if listed else math.nan


# ---- a quiet machine -----------------------------------------------------------------------------


def busy_cores() -> float:
    """Count the cores that were busy in the next second, while this process slept."""
    began_s, before_s = time.monotonic(), _busy_s(Path("/proc/stat").read_text())
    time.sleep(1.0)
    spent_s = _busy_s(Path("/proc/stat").read_text()) - before_s
    return spent_s / (time.monotonic() - began_s)


def _busy_s(stat: str) -> float:
    user, nice, system, _idle, _iowait, *others = map(int, stat.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def until_quiet(*, any_load: bool, look: Callable[[], float] = busy_cores) -> bool:
    """Wait until the machine is quiet; with ``any_load`` return at once whether it is.

    Raises:
        SystemExit: it isn't, after ten minutes.
    """
    for tried in range(_LOOKS):
        if (cores := look()) < _QUIET_CORES:
            return True
        if any_load:
            return False
        if tried % 30 == 0:
            progress(f"{cores:.1f} cores are busy: waiting for less than {_QUIET_CORES}")
    progress(
        f"The machine isn't quiet: {cores:.1f} cores busy after {_LOOKS} looks of a second. "
        "End what runs beside this, or give --any-load."
    )
    raise SystemExit(_NOT_JUDGED)


# ---- a run ---------------------------------------------------------------------------------------


def compare(
    rows: Mapping[str, Callable[[Path], Figures]],
    arguments: argparse.Namespace,
    *,
    as_json: bool = False,
) -> int:
    """Measure all rows in rounds, print what comes out; returns the exit code."""
    checkouts = {"base": arguments.against, "again": arguments.against, "here": HERE}
    measured: dict[str, dict[str, list[Figures]]] = {row: {} for row in rows}
    noisy = set()
    for turn in range(rounds_of(arguments)):
        for row, measure in rows.items():
            if not until_quiet(any_load=arguments.any_load):
                noisy.add(row)
            for side in order_of(turn):
                figures = measure(checkouts[side])
                measured[row].setdefault(side, []).append(figures)
            progress(f"round {turn + 1}, {row}: done")
    judged = arguments.figures.split(",")
    found = [
        Compared(**{**asdict(each), "noisy": row in noisy})
        for row, sides in measured.items()
        for each in compared(row, sides, arguments.bound, judged)
    ]
    if as_json:
        print(json.dumps({"compared": [asdict(c) | {"verdict": c.verdict} for c in found]}))  # noqa: T201
    else:
        print(laid_out([_HEAD, *map(_cells, found)]))  # noqa: T201
    return _code(found, judged)


def _code(found: Sequence[Compared], judged: Sequence[str]) -> int:
    names = [each.figure for each in found]
    if unknown := [pattern for pattern in judged if not fnmatch.filter(names, pattern)]:
        known = ", ".join(dict.fromkeys(names))
        sys.stderr.write(f"--figures {','.join(unknown)}: not measured. There are: {known}\n")
        return _NOT_JUDGED
    return _NOT_MET if any(each.verdict == "not met" for each in found) else 0


_HEAD = ["row", "figure", "base", "here", "here/base", "base/base", "limit", ""]


def _cells(of: Compared) -> list[str]:
    return [
        of.row,
        of.figure,
        f"{of.base:.4g}",
        f"{of.here:.4g}",
        f"{of.ratio:.3f}",
        f"±{of.deviation:.3f}",
        "" if of.limit is None else f"{of.limit:.3f}",
        of.verdict + (" (noisy)" if of.noisy else ""),
    ]


def laid_out(lines: Sequence[Sequence[str]]) -> str:
    """Lay a table out for people."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
