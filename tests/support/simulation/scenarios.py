"""Scenarios from seeds, and the smallest part of one that still fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from millstream_server.control.engine import Role
from millstream_testing.alphabet import VOCAB_SIZE
from tests.support.simulation.faults import KINDS
from tests.support.simulation.suite import Fault, Request, Scenario

_TOPOLOGIES = (
    (Role.AGGREGATED,) * 2,
    (Role.AGGREGATED,) * 3,
    (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
)
_SPAN_S = 30.0
"""Requests and faults begin within so long."""
_LASTS_S = (0.01, 0.1, 1.0, 5.0, 30.0)


def scenario(seed: int, requests: int, faults: int = 6) -> Scenario:
    """Make the scenario of a seed."""
    chance = random.Random(seed)
    return Scenario(
        seed,
        chance.choice(_TOPOLOGIES),
        chance.choice((0.0, 0.01, 0.02, 0.1)),
        tuple(_request(chance) for _ in range(requests)),
        tuple(_fault(chance) for _ in range(chance.randint(0, faults))),
    )


def _request(chance: random.Random) -> Request:
    odd = chance.random()
    return Request(
        at_s=chance.uniform(0, _SPAN_S),
        prompt=tuple(chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 40))),
        tokens=chance.choice((1, 2, 5, 20, 100)),
        n=chance.choice((1, 1, 1, 1, 3)),
        cancel_after_s=chance.expovariate(2) if odd < 0.1 else None,
        deadline_s=chance.expovariate(1) if 0.1 <= odd < 0.15 else None,
        read_pause_s=chance.uniform(0, 0.2) if 0.15 <= odd < 0.2 else 0.0,
    )


def _fault(chance: random.Random) -> Fault:
    return Fault(
        at_s=chance.uniform(0, _SPAN_S),
        kind=chance.choice(list(KINDS)),
        target=chance.randrange(1000),
        lasts_s=chance.choice(_LASTS_S),
    )


def shrunk(failing: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Return a smallest part of a failing scenario that still fails: fewer faults and requests."""
    for part in ("faults", "requests"):
        size = len(getattr(failing, part)) // 2
        while size:
            kept = getattr(failing, part)
            for start in range(0, len(kept), size):
                fewer = replace(failing, **{part: kept[:start] + kept[start + size :]})
                if fails(fewer):
                    failing = fewer
                    break
            else:
                size //= 2
        if part == "faults" and fails(fewer := replace(failing, faults=())):
            failing = fewer
    return failing
