"""Values that are made for each request: what a copy of one with changes is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.runtime.frozen import changed

SAMPLING = Sampling(max_new_tokens=2, top_k=3)
REQUEST = GenerationRequest(request_id="r", model="m", prompt=Prompt([1, 2]), sampling=SAMPLING)


def test_a_changed_copy_differs_in_its_changes_only() -> None:
    seeded = changed(SAMPLING, {"seed": 3})
    assert (seeded, SAMPLING.seed) == (replace(SAMPLING, seed=3), None)
    assert changed(REQUEST, {"sampling": seeded, "dp_rank": 1}) == replace(
        REQUEST, sampling=seeded, dp_rank=1
    )
    assert REQUEST.sampling is SAMPLING


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(AttributeError):
        changed(SAMPLING, {"sead": 3})
