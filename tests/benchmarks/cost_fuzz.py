"""Looks for inputs that cost a reader of callers' bytes more than its bound.

    python -m tests.benchmarks.cost_fuzz                          # an hour, all readers by turns
    python -m tests.benchmarks.cost_fuzz --seconds 60 --seed 7
    python -m tests.benchmarks.cost_fuzz --reader lark trailers
    python -m tests.benchmarks.cost_fuzz --list                   # readers and bounds
    python -m tests.benchmarks.cost_fuzz --reader lark --input FILE

Each reader has a grammar of inputs. Inputs are drawn from it, and those that cost most by byte are
changed, crossed and made larger: a climb. What is measured: calls (the same every time), the
thread's CPU time without garbage collections, memory; and how they grow with the input, where one
part of it comes 4 and 16 times as often. A reader's bounds are in its table (`--list`); an input
above one, an error that is no refusal, or one that doesn't end, is a finding: it is made small and
printed, and the exit code is 1. The inputs of a seed are the same as long as the clocks agree on
which of two costs more.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.fuzzing.costs import Cost, Gauge, Reader
from tests.benchmarks.fuzzing.trees import Node, rendered, repeats, resize, shown

_TURN_S = 1.0
"""One reader's turn, before the next one's."""
_FRESH = 0.3
_FILLED = 0.7
_KEPT = 3
"""Inputs of one kind that are changed further."""
_MOST_FINDINGS = 2
"""Of one reader and sort; a reader with so many whose CPU time is too long has no more turns."""
_GROWS_BY, _POINTS = 3, 4
_LEAST_CALLS, _LEAST_CPU_S = 1000, 1e-3
"""What grows less isn't judged."""
_SHRINKS = 200
"""Tries to make an input smaller."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An input above a bound."""

    reader: str
    kind: str
    cost: Cost
    tree: Node

    @property
    def sort(self) -> str:
        word = self.kind.split()[0]
        return word if word in {"memory", "raised", "growth"} else "time"


@dataclass
class Climb:
    """One reader's search."""

    reader: Reader
    gauge: Gauge
    chance: random.Random
    inputs: int = 0
    findings: list[Finding] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    """The largest figures: by byte, of inputs that aren't findings."""
    seconds: float = 0.0
    _elite: dict[int, list[tuple[float, Node]]] = field(default_factory=dict)
    """By the kind of the whole."""
    _seen: set[str] = field(default_factory=set)
    _grown: set[str] = field(default_factory=set)

    def turn(self, seconds: float) -> None:
        """Search for some time."""
        began = time.monotonic()
        for kind, tree in self._proposals():
            self._try(kind, tree)
            if time.monotonic() - began > seconds or self.done:
                break
        self.seconds += time.monotonic() - began

    @property
    def done(self) -> bool:
        return [each.sort for each in self.findings].count("time") >= _MOST_FINDINGS

    def _proposals(self) -> Iterator[tuple[int, Node]]:
        grammar = self.reader.grammar
        while True:
            kind = self.chance.randrange(grammar.kinds)
            kept = self._elite.get(kind, [])
            sizes = self.reader.sizes
            size = sizes[min(int(self.chance.triangular(0, len(sizes), 0)), len(sizes) - 1)]
            if not kept or self.chance.random() < _FRESH:
                tree = grammar.draw(self.chance, kind=kind)
                found = repeats(tree)
                self.chance.shuffle(found)
                yield kind, self._fit(tree, size)
                for part in found[:_KEPT]:
                    times = part.times
                    resize(tree, part, size)
                    yield kind, self._fit(tree.copy(), size)
                    part.times = times
                continue
            tree = self.chance.choice(kept)[1]
            others = [each for group in self._elite.values() for _, each in group]
            tree = grammar.changed(tree, others, self.chance)
            if self.chance.random() < _FILLED and (found := repeats(tree)):
                resize(tree, self.chance.choice(found), size)
            yield kind, self._fit(tree, size)

    def _fit(self, tree: Node, size: int) -> Node:
        """Make a tree that is too large smaller."""
        while tree.size > size and (found := [e for e in repeats(tree) if e.times > 1]):
            largest = max(found, key=lambda each: each.times)
            resize(tree, largest, size)
            if tree.size > size and largest.times > 1:
                largest.times = 1
        return tree

    def _try(self, kind: int, tree: Node) -> None:
        text = rendered(tree)
        mark = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if mark in self._seen or not text or len(text) > 2 * self.reader.sizes[-1]:
            return
        self._seen.add(mark)
        cost = self._measured(tree)
        load = cost.load(self.reader.bound)
        if load > 1:
            load = self._check(tree, cost)
        else:
            for name, value in (
                ("calls", cost.calls / (cost.size + 64)),
                ("us", cost.cpu_s * 1e6 / (cost.size + 256)),
                ("memory", max(cost.memory, cost.resident) / (cost.size + (64 << 10))),
            ):
                self.worst[name] = max(self.worst.get(name, 0), value)
        if not math.isfinite(load):
            return
        kept = self._elite.setdefault(kind, [])
        score = load / (0.01 + len(text) / self.reader.sizes[-1]) ** 0.2
        score = round(math.log2(max(score, 1e-9)), 1)
        if len(kept) < _KEPT or score > kept[-1][0]:
            kept.append((score, tree))
            kept.sort(key=lambda each: -each[0])
            del kept[_KEPT:]
            self._grow(tree)
            if kept[0][1] is tree and repeats(tree):  # the best: as large as can be
                tree = tree.copy()
                resize(tree, max(repeats(tree), key=lambda each: each.size), self.reader.sizes[-1])
                self._try(kind, self._fit(tree, self.reader.sizes[-1]))

    def _measured(self, tree: Node) -> Cost:
        self.inputs += 1
        return self.gauge.measure(self.reader.encoded(rendered(tree)))

    def _check(self, tree: Node, cost: Cost) -> float:
        """Judge what seems to be above a bound; return its share of it, infinity if it is."""
        if not cost.problem:
            cost = self.gauge.confirmed(self.reader.encoded(rendered(tree)))
        loads = cost.loads(self.reader.bound)
        kind = cost.problem or max(loads, key=lambda name: loads[name])
        if not cost.problem and loads[kind] <= 1:
            return loads[kind]
        self._found(Finding(reader=self.reader.name, kind=kind, cost=cost, tree=tree))
        return math.inf

    def _found(self, finding: Finding) -> None:
        alike = [each for each in self.findings if each.sort == finding.sort]
        known = {each.kind if each.sort == "raised" else each.cost.where for each in alike}
        this = finding.kind if finding.sort == "raised" else finding.cost.where
        if len(alike) < _MOST_FINDINGS and this not in known:
            self.findings.append(finding)

    # ---- growth

    def _grow(self, tree: Node) -> None:
        """Look how the cost grows with each part of a tree that comes again and again."""
        for number, part in enumerate(repeats(tree)):
            mark = f"{shown(part)[:80]} {part.symbol}"
            if part.times > 1 and mark not in self._grown:
                self._grown.add(mark)
                costs = self._points(tree, number, self.gauge.measure)
                if len(costs) == _POINTS and self._exponent(costs) > self.reader.bound.exponent:
                    self._check_growth(tree, number)

    def _points(self, tree: Node, number: int, measure: Callable[[bytes], Cost]) -> list[Cost]:
        """Measure a tree with more and more of a part, as far as it can be measured."""
        costs: list[Cost] = []
        for _ in range(_POINTS):
            self.inputs += 1
            costs.append(measure(self.reader.encoded(rendered(tree))))
            tree = tree.copy()
            repeats(tree)[number].times *= _GROWS_BY
            if costs[-1].problem or tree.size > 4 * self.reader.sizes[-1]:
                break
            if len(costs) > 2 and self._exponent(costs) <= self.reader.bound.exponent:
                break
        return costs

    @staticmethod
    def _exponent(costs: Sequence[Cost]) -> float:
        """Return how the cost of what was added grows with its size: the least of all steps."""
        found = math.inf
        steps = list(itertools.pairwise(costs))
        for (a, b), (_, c) in itertools.pairwise(steps):
            by_calls = b.calls - a.calls > _LEAST_CALLS and c.calls
            first = b.calls - a.calls if by_calls else b.cpu_s - a.cpu_s
            second = c.calls - b.calls if by_calls else c.cpu_s - b.cpu_s
            if min(b.size - a.size, c.size - b.size) <= 0 or (
                not by_calls and min(first, second) < _LEAST_CPU_S
            ):
                return 0.0
            grows = math.log(max(second / first, 0.01))
            found = min(found, grows / math.log((c.size - b.size) / (b.size - a.size)))
        return 0.0 if math.isinf(found) else found

    def _check_growth(self, tree: Node, number: int) -> None:
        costs = self._points(tree, number, self.gauge.confirmed)
        exponent = self._exponent(costs) if len(costs) == _POINTS else 0.0
        self.worst["exponent"] = max(self.worst.get("exponent", 0), exponent)
        if exponent > self.reader.bound.exponent:
            figures = ", ".join(f"{c.size} bytes {c.calls} calls {c.cpu_s:.4f} s" for c in costs)
            kind = f"growth with exponent {exponent:.2f}: {figures}"
            self._found(Finding(reader=self.reader.name, kind=kind, cost=costs[0], tree=tree))

    # ---- findings

    def shrunk(self, finding: Finding, seconds: float = 10.0) -> Finding:
        """Make a finding's input smaller as long as it is one."""
        if finding.kind.startswith("growth"):
            return finding
        ends_s, left, found = time.monotonic() + seconds, _SHRINKS, True
        while found and left and time.monotonic() < ends_s:
            found = False
            for tree in self.reader.grammar.smaller(finding.tree):
                left -= 1
                if not left or time.monotonic() > ends_s:
                    break
                if tree.size < finding.tree.size and (cost := self._same(finding, tree)):
                    kind = cost.problem or finding.kind
                    finding = Finding(reader=finding.reader, kind=kind, cost=cost, tree=tree)
                    found = True
                    break
        return finding

    def _same(self, finding: Finding, tree: Node) -> Cost | None:
        """Return the cost of a smaller input, if it is above a bound as well."""
        bound, cost = self.reader.bound, self._measured(tree)
        if cost.problem[:8] != finding.cost.problem[:8] or cost.load(bound) <= 1:
            return None
        if not cost.problem:
            cost = self.gauge.confirmed(self.reader.encoded(rendered(tree)))
        return cost if cost.load(bound) > 1 else None


def _listed(readers: Sequence[Reader]) -> str:
    lines = [
        f"{'reader':22}{'calls/B':>8}{'us/B':>7}{'mem x':>7}{'exp':>5}{'most s':>7}  sizes, modules"
    ]
    for each in readers:
        bound = each.bound
        of = "" if bound.memory_of >= 1 << 30 else f" of {bound.memory_of >> 10} KiB"
        lines.append(
            f"{each.name:22}{bound.calls:8.1f}{bound.us:7.1f}{bound.memory:7.0f}"
            f"{bound.exponent:5.1f}{bound.total_s:7.1f}  {each.sizes[-1] >> 10} KiB{of}, {each.of}"
        )
    return "\n".join(lines)


def _table(climbs: Sequence[Climb]) -> str:
    lines = [
        f"{'reader':22}{'inputs':>7}{'calls/B':>9}{'us/B':>8}{'mem x':>7}{'exp':>6}{'found':>6}"
    ]
    for climb in climbs:
        worst = climb.worst
        lines.append(
            f"{climb.reader.name:22}{climb.inputs:7}{worst.get('calls', 0):9.2f}"
            f"{worst.get('us', 0):8.2f}{worst.get('memory', 0):7.1f}"
            f"{worst.get('exponent', 0):6.2f}{len(climb.findings):6}"
        )
    return "\n".join(lines)


def search(
    readers: Sequence[Reader], seconds: float, seed: int, keep: Path | None = None
) -> Sequence[Finding]:
    """Search for some time, readers by turns; print and return what was found."""
    found: list[Finding] = []
    with contextlib.ExitStack() as gauges:
        climbs = [
            Climb(each, gauges.enter_context(Gauge.of(each)), random.Random(f"{seed}/{each.name}"))
            for each in readers
        ]
        began = time.monotonic()
        turn_s = min(_TURN_S, seconds / len(readers))
        while time.monotonic() - began < seconds and not all(climb.done for climb in climbs):
            for climb in climbs:
                known = len(climb.findings)
                if not climb.done and time.monotonic() - began < seconds:
                    climb.turn(turn_s)
                for finding in climb.findings[known:]:
                    after_s = time.monotonic() - began
                    head = f"FOUND in {climb.reader.name} after {after_s:.0f} s: {finding.kind}"
                    print(f"{head}\n  {finding.cost}", flush=True)  # noqa: T201
                    found.append(climb.shrunk(finding))
                    _show(found[-1], climb.reader, keep)
        print(_table(climbs))  # noqa: T201
    return found


def _show(finding: Finding, reader: Reader, keep: Path | None) -> None:
    text = rendered(finding.tree)
    print(f"  {finding.cost}\n  {shown(finding.tree)[:2000]!r}", flush=True)  # noqa: T201
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        data = reader.encoded(text)
        name = f"{reader.name}-{hashlib.sha256(data).hexdigest()[:8]}"
        keep.joinpath(name).write_bytes(data)


def main() -> int:
    """Parse arguments, search; return 1 if something was found."""
    from tests.benchmarks.fuzzing.readers import READERS  # noqa: PLC0415 - they import the server

    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.cost_fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=3600, help="how long (3600)")
    parser.add_argument("--seed", type=int, default=1, help="another one makes other inputs (1)")
    parser.add_argument("--reader", nargs="+", default=(), help="only these", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the readers and their bounds")
    parser.add_argument("--keep", type=Path, help="folder to keep the inputs that are found in")
    parser.add_argument("--input", type=Path, help="measure this file, one that was kept")
    given = parser.parse_args()
    readers = [each for each in READERS if not given.reader or each.name in given.reader]
    if unknown := set(given.reader) - {each.name for each in readers}:
        parser.error(f"no reader is called {', '.join(sorted(unknown))}")
    if given.list:
        print(_listed(readers))  # noqa: T201
        return 0
    if given.input:
        with Gauge.of(readers[0]) as gauge:
            print(gauge.confirmed(given.input.read_bytes()))  # noqa: T201
        return 0
    found = search(readers, given.seconds, given.seed, given.keep)
    print(f"seed {given.seed}: {len(found)} inputs above their bounds")  # noqa: T201
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
