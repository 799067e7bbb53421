"""Faults of real SGLang workers in the middle of a hand-off: no chat fails, hangs or is wrong.

Rows of `tests.benchmarks.faults` with few chats. Last by name: they restart workers of the suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.faults import Faults
from tests.e2e.conftest import Suite
from tests.support.benchmarks.known_chats import KnownChats

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_CHATS = 12
_ROWS = ("prefill-killed", "prefill-engine-stopped", "decode-engine-stopped", "decode-killed")


@pytest.fixture(scope="module")
def chats() -> KnownChats:
    # Prefill computes 16 tokens a step, and sends each step's: 25 parts a prompt.
    return KnownChats(prompt_tokens=400, new_tokens=64)


@pytest.mark.parametrize("name", _ROWS)
async def test_a_fault_in_mid_transfer_costs_no_chat(
    suite: Suite, chats: KnownChats, tmp_path: Path, name: str
) -> None:
    workers = {
        "prefill": suite.prefill, "decode": suite.decode, "aggregated": suite.aggregated,
    }  # fmt: skip
    faults = Faults(workers, suite.model, tmp_path, chats, stopped_s=2.0)
    if not chats.known:
        await faults.learn()
    row = await faults.run(name, _CHATS, at_once=_CHATS)
    assert row.broken == [], row
    assert row.statuses == {"OK": _CHATS}
    if name == "decode-engine-stopped":
        assert "CONTINUE" not in row.went_on, "a pause is no loss for those that decode"
    for front in (suite.front_aggregated, suite.front_disaggregated):
        await front.until_serving(timeout_s=30)
