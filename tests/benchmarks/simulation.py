"""Tries to break the promises of docs/guarantees.md: simulated suites under faults, from seeds.

    python -m tests.benchmarks.simulation                          # 10,000 requests, half a minute
    python -m tests.benchmarks.simulation --requests 1000000 --jobs 2     # most of an hour
    python -m tests.benchmarks.simulation --seed 4711 --shrink     # one seed, and its smallest part
    python -m tests.benchmarks.simulation --rolling                # a stale DNS, one pod a role

Processors, their links, the routing, the workers and the Python client are real and run in one
process, on an event loop with a clock of its own and a simulated network between them
(tests/support/simulation). A seed decides topology, engines, requests and faults: completions and
conversations with reasoning, tool calls, stop strings, several choices, penalties, grammars, seeds
and logprobs; processes killed, gone, stopped, hung, drained; engines that die or draw other tokens;
connections cut, half-open, reset, slow; clocks that jump; addresses that discovery loses. Each
answer is checked token by token, and after each run nothing may be left anywhere. The same seed
gives the same run. It exits with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import sys
import time
from collections import Counter
from functools import partial

from tests.support.simulation.scenarios import rolling, scenario, shrunk
from tests.support.simulation.suite import Scenario, play

_FEW = 9


def main() -> int:
    given = _parser().parse_args()
    logging.disable(logging.CRITICAL)
    if given.seed is not None:
        return _one(given.seed, given.each, shrink=given.shrink)
    count = -(-given.requests // given.each)
    seeds = range(given.first, given.first + count)
    ends: Counter[str] = Counter()
    broken = done = 0
    until_s = time.monotonic() + given.seconds
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        play_one = partial(_play, each=given.each, rolls=given.rolling)
        played = pool.imap_unordered(play_one, seeds)
        for done, (seed, wrong, ended) in enumerate(played, 1):
            ends.update(ended)
            if wrong:
                broken += 1
                _say(f"seed {seed}: {wrong[0]}")
            if done % 100 == 0:
                _say(f"{done} of {count} seeds, {broken} broke a promise")
            if time.monotonic() > until_s:
                break
    counted = ", ".join(f"{count:,} {name}" for name, count in sorted(ends.items()))
    _say(f"{done * given.each:,} requests over {done:,} seeds: {counted}")
    _say(f"{broken} seeds broke a promise")
    return 1 if broken else 0


def _one(seed: int, each: int, *, shrink: bool) -> int:
    told = scenario(seed, each)
    result = play(told)
    for what in result.wrong:
        _say(what)
    if result.wrong and shrink:
        told = shrunk(told, lambda tried: bool(play(tried).wrong))
        _say(*play(told).wrong)
    _show(told)
    return 1 if result.wrong else 0


def _show(told: Scenario) -> None:
    roles = ", ".join(role.value for role in told.workers)
    few = told.requests if len(told.requests) <= _FEW else ()
    _say(
        f"{told.processors} Processors; workers: {roles}; a step takes {told.step_s} s; "
        f"{told.machine}; answers as {told.form} writes them",
        *told.faults,
        *few,
    )


def _say(*lines: object) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def _play(seed: int, each: int, *, rolls: bool) -> tuple[int, list[str], dict[str, int]]:
    logging.disable(logging.CRITICAL)
    result = play((rolling if rolls else scenario)(seed, each))
    lost = [f"ended with {code}" for code in result.ends if rolls and code != "OK"]
    return seed, result.wrong + lost, result.ends


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000, help="how many, in all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long")
    parser.add_argument("--each", type=int, default=100, help="requests of one seed")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--rolling", action="store_true", help="nothing but rolling restarts")
    parser.add_argument("--seed", type=int, help="play this one, and show it")
    parser.add_argument("--shrink", action="store_true", help="with --seed: look for less of it")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
