"""Whether this checkout costs more than BASE: the arithmetic, and the wait for a quiet machine."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.benchmarks import against
from tests.benchmarks.against import HERE, Compared, compare, compared, order_of, until_quiet

BASE = HERE / "docs"
"""Some other folder: nothing is read there."""
NOT_JUDGED = 2


def _sides(base: Sequence[float], again: Sequence[float], here: Sequence[float]) -> list[Compared]:
    sides = {"base": base, "again": again, "here": here}
    figures = {side: [{"us": value} for value in values] for side, values in sides.items()}
    return compared("row", figures, 1.02, ["us"])


def test_a_ratio_is_of_one_round_and_the_limit_grows_by_how_base_differs_from_itself() -> None:
    (found,) = _sides([10, 20, 40], again=[11, 19, 40], here=[10.5, 22, 41.2])
    # 1.05, 1.10, 1.03 over BASE; BASE over itself is 0.1, 0.05 and 0 from 1
    assert (found.base, found.here) == (20, 22)
    assert found.ratio == pytest.approx(1.05)
    assert found.deviation == pytest.approx(0.05)
    assert found.limit == pytest.approx(1.07)
    assert found.verdict == "met"


def test_above_the_limit_it_is_not_met() -> None:
    (found,) = _sides([10, 10, 10], again=[10, 10, 10], here=[10.3, 10.3, 9])
    assert (found.limit, found.verdict) == (1.02, "not met")


def test_base_that_is_always_dearer_the_second_time_differs_from_itself() -> None:
    (found,) = _sides([10, 10, 10], again=[11, 11, 11], here=[10, 10, 10])
    assert found.deviation == pytest.approx(0.1)


def test_what_base_never_takes_is_not_met() -> None:
    (found,) = _sides([0, 0], again=[0, 0], here=[1, 1])
    assert found.verdict == "not met"


def test_only_what_both_have_is_compared_and_only_what_a_pattern_names_is_judged() -> None:
    base, here = {"a_us": 1.0, "b_ms": 1.0, "gone_us": 1.0}, {"a_us": 1.0, "b_ms": 9.0, "new": 1.0}
    found = compared("row", {"base": [base], "again": [base], "here": [here]}, 1.0, ["*_us"])
    assert [(each.figure, each.verdict) for each in found] == [("a_us", "met"), ("b_ms", "")]


def test_each_side_is_first_second_and_last_in_turn() -> None:
    orders = [order_of(turn) for turn in range(3)]
    assert {order[0] for order in orders} == {"base", "again", "here"}
    assert [*zip(*orders, strict=True)] == orders
    assert order_of(3) == orders[0]


def test_a_round_waits_for_a_quiet_machine() -> None:
    seen = iter([1.3, 0.5, 0.49, 2.0])
    assert until_quiet(any_load=False, look=lambda: next(seen))
    assert next(seen) == 2.0


def test_a_machine_that_never_is_quiet_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        until_quiet(any_load=False, look=lambda: 1.5)
    assert ended.value.code == NOT_JUDGED
    assert "isn't quiet: 1.5 cores busy" in capsys.readouterr().err


def test_busy_is_all_but_idle_and_waiting_and_counts_what_the_host_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    assert against._busy_s("cpu  100 20 30 9999 888 4 5 6 70 7\ncpu0 1 1 1 1 1\n") == 1.65


@pytest.mark.parametrize(
    ("here", "figures", "expected"),
    [(1.0, "us", (0, "met")), (2.0, "us", (1, "not met")), (2.0, "ms", (NOT_JUDGED, ""))],
)
def test_a_run_measures_both_checkouts_in_rounds_and_its_exit_code_is_the_verdict(
    here: float,
    figures: str,
    expected: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, verdict = expected
    looks = itertools.cycle([0.0, 1.0])
    monkeypatch.setattr(until_quiet, "__kwdefaults__", {"look": lambda: next(looks)})
    seen: list[Path] = []

    def measure(checkout: Path) -> dict[str, float]:
        seen.append(checkout)
        return {"us": here if checkout == HERE else 1.0}

    arguments = argparse.Namespace(
        against=BASE, rounds=2, own_rounds=1, bound=1.02, figures=figures, any_load=True
    )
    assert compare({"quiet": measure, "noisy": measure}, arguments, as_json=True) == code
    first, second = [BASE, BASE, HERE], [BASE, HERE, BASE]
    assert seen == first * 2 + second * 2
    rows = json.loads(capsys.readouterr().out)["compared"]
    assert [(row["row"], row["verdict"], row["noisy"]) for row in rows] == [
        ("quiet", verdict, False),
        ("noisy", verdict, True),
    ]
