"""Scenarios from seeds, and the smallest part of one that still fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millstream_server.control.engine import Role
from millstream_testing.alphabet import VOCAB_SIZE
from tests.support.simulation.engine import Machine
from tests.support.simulation.faults import KINDS
from tests.support.simulation.requests import FORMATS, Chat, Completion, Knobs, Turn
from tests.support.simulation.suite import Fault, Scenario

_DIFFUSION = (Role.DIFFUSION,) * 2
_TOPOLOGIES = (
    (Role.AGGREGATED,) * 2,
    (Role.AGGREGATED,) * 3,
    (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
    _DIFFUSION,
)
_MACHINES = (
    Machine(),
    Machine(resumes=False),
    Machine("vllm", resumes=False),
    Machine(seeds=False, resumes=False),
)
_SPAN_S = 12.0
"""Requests and faults begin within so long."""
_LASTS_S = (0.01, 0.1, 1.0, 5.0, 30.0)
_WORDS = ("well", "so", "Grüße", "日本", "a clock: ⏰", "1 + 1 = 2", "yes", "{no}")
_TOOLS = ("clock", "search", "sum")
_LONG_EVERY = 8


def scenario(
    seed: int, requests: int, faults: int = 12, kinds: Sequence[str] = tuple(KINDS)
) -> Scenario:
    """Make the scenario of a seed."""
    chance = random.Random(seed)
    workers = chance.choice(_TOPOLOGIES)
    machine = Machine() if workers is _DIFFUSION else chance.choice(_MACHINES)
    full = chance.random() < 0.2
    return Scenario(
        seed,
        workers,
        chance.choice((0.0, 0.01, 0.05, 0.1, 0.2)),
        tuple(
            _completion(chance, machine, diffusion=True)
            if workers is _DIFFUSION
            else chance.choice((_completion, _completion, _chat))(chance, machine)
            for _ in range(requests)
        ),
        tuple(_fault(chance, kinds) for _ in range(chance.randint(0, faults))),
        processors=chance.choice((1, 2, 2, 3)),
        machine=machine,
        form=chance.choice(FORMATS),
        prefill_first=chance.random() < 0.3,
        pacing_s=chance.choice((0.0, 0.05, 0.05)),
        max_running=chance.choice((1, 3)) if full else 0,
        max_queued=chance.choice((2, 8)) if full else 1024,
        settles_long=seed % _LONG_EVERY == 0,
    )


def rolling(seed: int, requests: int) -> Scenario:
    """Replace the only prefill and the only decode worker, one of each for each of two Processors.

    DNS answers are 30 s old, and a Processor looks every 6 s.
    """
    chance = random.Random(seed)
    made = tuple(
        replace(
            _completion(chance, Machine()),
            at_s=chance.uniform(0, 60.0), cancel_after_s=None, deadline_s=None, library=False,
            read_pause_s=0.0,
        )
        for _ in range(requests)
    )  # fmt: skip
    faults = tuple(Fault(chance.uniform(0, 15.0), "roll", index, 36.0) for index in range(2))
    return Scenario(seed, (Role.PREFILL, Role.DECODE), 0.05, made, faults, processors=2)


def _manner(chance: random.Random) -> dict[str, Any]:
    odd = chance.choices(
        ("", "cancels", "has a deadline", "reads slowly", "stops reading"), (16, 2, 1, 1, 0.3)
    )[0]
    stays_s = {"cancels": chance.expovariate(2), "stops reading": 60.0}
    pauses_s = {"reads slowly": chance.uniform(0, 0.2), "stops reading": 100.0}
    return {
        "at_s": chance.uniform(0, _SPAN_S),
        "cancel_after_s": stays_s.get(odd),
        "deadline_s": chance.expovariate(1) if odd == "has a deadline" else None,
        "read_pause_s": pauses_s.get(odd, 0.0),
        "library": chance.random() < 0.3,
        "processor": chance.randrange(6),
    }


def _knobs(chance: random.Random, machine: Machine, **more: Any) -> Knobs:
    """Draw options that the machine takes: each row of docs/guarantees.md's table has its share."""
    one = chance.choice(("plain", "plain", "penalty", "grammar", "logprobs", "random", "stop"))
    draws = one == "random" or chance.random() < 0.1
    seeded = draws and machine.seeds and chance.random() < 0.5
    return Knobs(
        n=chance.choice((1, 1, 1, 1, 3)),
        random=draws,
        seed=chance.randrange(1 << 31) if seeded else None,
        penalty=one == "penalty",
        grammar=one == "grammar" and machine.grammars,
        logprobs=one == "logprobs",
        prompt_logprobs=one == "logprobs" and chance.random() < 0.5,
        **more,
    )


def _completion(chance: random.Random, machine: Machine, *, diffusion: bool = False) -> Completion:
    prompt = tuple(chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 40)))
    tokens = chance.choice((1, 2, 20, 40, 80))
    ignore_eos = chance.random() < 0.5
    least = chance.randint(0, tokens) if chance.random() < 0.2 else 0
    if diffusion:
        knobs = Knobs(tokens, n=chance.choice((1, 1, 3)), ignore_eos=ignore_eos, diffusion=True)
    else:
        stop = chance.choice(("", "", "", "", "GHI", "mno", "xyz{"))
        knobs = _knobs(
            chance, machine, tokens=tokens, ignore_eos=ignore_eos, min_tokens=least, stop=stop
        )
    return Completion(prompt=prompt, knobs=knobs, **_manner(chance))


def _chat(chance: random.Random, machine: Machine) -> Chat:
    manner = _manner(chance)
    turns = tuple(_turn(chance) for _ in range(1 if manner["library"] else chance.randint(1, 3)))
    tokens = chance.choice((5, 40, 400, 400))
    stop = chance.choice(("", "", "", "", " = ", "clock"))
    knobs = replace(
        _knobs(chance, machine, tokens=tokens, ignore_eos=False, stop=stop), prompt_logprobs=False
    )
    return Chat(turns=turns, knobs=knobs, events=chance.random() < 0.7, **manner)


def _turn(chance: random.Random) -> Turn:
    def words() -> str:
        return " ".join(chance.choices(_WORDS, k=chance.randint(1, 3)))

    calls = chance.choice((0, 0, 0, 1, 2))
    return Turn(
        words(),
        words() if chance.random() < 0.5 else "",
        tuple((chance.choice(_TOOLS), words()) for _ in range(calls)),
        chance.expovariate(1) if chance.random() < 0.1 else None,
    )


def _fault(chance: random.Random, kinds: Sequence[str]) -> Fault:
    return Fault(
        at_s=chance.uniform(0, _SPAN_S),
        kind=chance.choice(list(kinds)),
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
