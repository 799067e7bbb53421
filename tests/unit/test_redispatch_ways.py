"""The table of how a choice that has lost its worker goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from millstream_server.control.engine import Role
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.processor.redispatch_ways import ROWS, Lost, Way, way_of
from tests.support.processor.lossy_turn import REGEX

KNOB_NAMES = {knob.name for knob in dataclasses.fields(Sampling)} - {"seed"}


def _lost(**lost: Any) -> Lost:
    knobs = {name: lost.pop(name) for name in list(lost) if name in KNOB_NAMES}
    request = GenerationRequest(
        prompt=lost.pop("prompt", Prompt([1])),
        sampling=Sampling(**{"max_new_tokens": 9, **knobs}),
        logprobs=lost.pop("logprobs", None),
    )
    base: dict[str, Any] = {
        "role": Role.DECODE,
        "engine": "sglang",
        "seed": 1,
        "seed_is_clients": False,
        "resumes": True,
        "given": False,
        "media_held": False,
    }
    return Lost(**{**base, "request": request, **lost})


BARE = {"resumes": False}
PICTURE = Prompt([1], cast("Any", (object(),)))
EACH: dict[str, Lost] = {
    "tokens were given to the client": _lost(given=True),
    "an engine that can't be told what was output": _lost(resumes=False),
    "sampled without a seed": _lost(seed=None),
    "a client's seed, on vLLM": _lost(seed_is_clients=True, engine="vllm"),
    "structured output": _lost(constraint=REGEX),
    "penalties": _lost(repetition_penalty=1.1),
    "logprobs": _lost(logprobs=LogprobOptions(prompt=True)),
    "images and videos": _lost(prompt=PICTURE),
    "text diffusion": _lost(role=Role.DIFFUSION),
}
"""A choice for each row that has no other."""


def test_each_row_is_about_one_feature() -> None:
    assert not [row for row in ROWS if row.holds(_lost())]
    found = {feature: [r.feature for r in ROWS if r.holds(lost)] for feature, lost in EACH.items()}
    assert found == {row.feature: [row.feature] for row in ROWS}


def test_the_page_has_the_rows_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs/guarantees.md").read_text("utf-8")
    _, _, table = page.partition("| what a request has | continue | with state | again | replay |")
    cells = [
        [c.strip() for c in line.split("|")[1:-1]]
        for line in table.split("\n\n")[0].split("\n")[2:]
    ]
    order = (Way.CONTINUE, Way.CONTINUE_WITH_STATE, Way.AGAIN, Way.REPLAY)
    told = [[r.feature, *("yes" if way in r.ways else "no" for way in order)] for r in ROWS]
    assert cells == told


@pytest.mark.parametrize(
    ("lost", "way"),
    [
        (_lost(), Way.CONTINUE),
        (_lost(given=True, seed=None, frequency_penalty=1.0), Way.CONTINUE_WITH_STATE),
        (_lost(given=True, seed=None, frequency_penalty=1.0, **BARE), None),
        (_lost(given=True, frequency_penalty=1.0, **BARE), Way.REPLAY),
        (_lost(given=True, seed=None, temperature=0.0, presence_penalty=-1.0, **BARE), Way.REPLAY),
        (_lost(given=False, seed=None, constraint=REGEX, **BARE), Way.AGAIN),
        (_lost(given=True, seed_is_clients=True), Way.CONTINUE),
        (_lost(given=True, seed_is_clients=True, engine="vllm"), Way.REPLAY),
        (_lost(given=True, seed_is_clients=True, engine="vllm", temperature=0.0), Way.CONTINUE),
        (_lost(prompt=PICTURE), None),
        (_lost(prompt=PICTURE, media_held=True), Way.CONTINUE),
        (_lost(role=Role.DIFFUSION), Way.AGAIN),
        (_lost(role=Role.DIFFUSION, given=True), None),
    ],
)
def test_a_request_takes_the_cheapest_way_that_its_features_allow(
    lost: Lost, way: Way | None
) -> None:
    assert way_of(lost) is way
