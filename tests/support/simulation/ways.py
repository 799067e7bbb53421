"""How a choice may go on, as docs/guarantees.md says: its table, row by row."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from millstream.v1 import processor_pb2
from tests.support.simulation.engine import Machine
from tests.support.simulation.requests import Knobs

_PAGE = Path(__file__).parents[3] / "docs/guarantees.md"
_HEAD = "| what a request has | continue | with state | again | replay |"
CONTINUE = processor_pb2.REDISPATCH_WAY_CONTINUE
WITH_STATE = processor_pb2.REDISPATCH_WAY_CONTINUE_WITH_STATE
AGAIN = processor_pb2.REDISPATCH_WAY_AGAIN
REPLAY = processor_pb2.REDISPATCH_WAY_REPLAY
_ORDER = (CONTINUE, WITH_STATE, AGAIN, REPLAY)
GIVEN = "tokens were given to the client"


@lru_cache
def table() -> dict[str, frozenset[int]]:
    """Return the page's rows: what a request has, and the ways that are right with it."""
    _, _, lines = _PAGE.read_text("utf-8").partition(_HEAD)
    rows = (line.strip("|").split("|") for line in lines.split("\n\n")[0].split("\n")[2:])
    return {
        feature.strip(): frozenset(
            way for way, cell in zip(_ORDER, cells, strict=True) if cell.strip() == "yes"
        )
        for feature, *cells in rows
    }


def features(knobs: Knobs, machine: Machine) -> list[str]:
    """Return the rows that hold for a request, whatever its client has of the answer."""
    drawn = knobs.random and not knobs.diffusion
    holds = {
        "an engine that can't be told what was output": not machine.resumes or knobs.diffusion,
        "sampled without a seed": drawn and not machine.seeds,
        "a client's seed, on vLLM": drawn and knobs.seed is not None and not machine.by_position,
        "structured output": knobs.grammar,
        "penalties": knobs.penalty,
        "logprobs": knobs.logprobs,
        "images and videos": False,
        "text diffusion": knobs.diffusion,
    }
    return [feature for feature, found in holds.items() if found]


def way(found: Collection[str]) -> int | None:
    """Return the cheapest way that all these rows allow; None: there is none."""
    allowed = set(_ORDER).intersection(*(table()[feature] for feature in found))
    return next((each for each in _ORDER if each in allowed), None)


def wrong_way(knobs: Knobs, machine: Machine, done: processor_pb2.Redispatch) -> str:
    """Return what is wrong with how a choice went on; else ""."""
    found = features(knobs, machine)
    right = {way([*found, GIVEN]), way(found)} - {None}
    if done.way == AGAIN and done.token_count:
        return f"it began again, and {done.token_count} tokens had come"
    if not right:
        return f"it went on, with {found}, which allow no way"
    if done.way in right or (done.way == AGAIN and not done.token_count):
        return ""
    name = processor_pb2.RedispatchWay.Name(done.way)
    return f"with {found} it went on by {name}"
