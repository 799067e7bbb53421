"""The chart's alerts fire when they should and are silent when they should, by promtool."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.alert_cases import LONG, SHORT, Case
from tests.support.deploy.deploy_tools import NAMESPACE, RELEASE, Manifest, objects

_ON = {
    "models": {"m": {"uri": "hf://org/m"}},
    "decode": {"enabled": True, "pools": {"main": {"model": "m"}}},
}
_SCOPE = {"namespace": NAMESPACE, "job": f"{RELEASE}-millstream"}


@pytest.fixture(scope="module")
def rule_file(
    render: Callable[..., list[Manifest]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    (rule,) = objects(render(values=_ON), "PrometheusRule")
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(json.dumps({"groups": rule["spec"]["groups"]}), encoding="utf-8")
    return path


def _promtool(promtool: Path, *arguments: str | Path) -> str:
    ran = subprocess.run(
        [promtool, *arguments], capture_output=True, text=True, check=False, timeout=100
    )
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


def test_promtool_takes_the_rules(promtool: Path, rule_file: Path) -> None:
    assert _promtool(promtool, "check", "rules", rule_file) == ""


def test_each_alert_has_a_case(rule_file: Path) -> None:
    groups = json.loads(rule_file.read_text(encoding="utf-8"))["groups"]
    alerts = {
        (rule["alert"], rule["labels"]["severity"])
        for group in groups
        for rule in group["rules"]
        if "alert" in rule
    }
    assert alerts == {(case.alert, case.severity) for case in (*SHORT, *LONG)}


@pytest.mark.parametrize(("cases", "step"), [(SHORT, "1m"), (LONG, "4m")], ids=["short", "long"])
def test_alerts(
    cases: Sequence[Case], step: str, promtool: Path, rule_file: Path, tmp_path: Path
) -> None:
    unit = {
        "rule_files": [str(rule_file)],
        "evaluation_interval": step,
        "tests": list(_tests(cases)),
    }
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps(unit), encoding="utf-8")
    assert _promtool(promtool, "test", "rules", path) == ""


def _tests(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Make promtool's tests, each of several cases that have no metric and no alert in common."""
    for firing in (True, False):
        waiting = list(cases)
        while waiting:
            taken: set[str] = set()
            together: list[Case] = []
            for case in list(waiting):
                series = case.fires if firing else case.quiet
                names = {name.partition("{")[0] for name in series} | {case.alert}
                if not names & taken:
                    taken |= names
                    together.append(case)
                    waiting.remove(case)
            yield _test(together, firing=firing)


def _test(cases: Sequence[Case], *, firing: bool) -> dict[str, Any]:
    scope = ", ".join(f'{name}="{value}"' for name, value in _SCOPE.items())
    return {
        "interval": "1m",
        "input_series": [
            {"series": name.replace("{", f"{{{scope}, ", 1), "values": values}
            for case in cases
            for name, values in (case.fires if firing else case.quiet).items()
        ],
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{case.alert}", severity="{case.severity}"}}',
                "eval_time": f"{case.minutes}m",
                "exp_samples": [_alert(case)] if firing else [],
            }
            for case in cases
        ],
    }


def _alert(case: Case) -> dict[str, Any]:
    labels = {
        "alertname": case.alert,
        "alertstate": "firing",
        "severity": case.severity,
        **_SCOPE,
        **case.labels,
    }
    pairs = ", ".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return {"labels": f"ALERTS{{{pairs}}}", "value": 1}
