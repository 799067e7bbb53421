"""What PromQL of the chart may name, and a check that it names nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.deploy.deploy_tools import ROOT, tool
from tests.support.telemetry.scraping import declared

_SCRIPT = Path(__file__).parents[2] / "deploy" / "promql_labels.py"
_SGLANG = ROOT / "tests" / "integration" / "sglang_engine" / "test_metrics.py"
TARGET = frozenset({"namespace", "job", "instance", "pod", "container", "component", "pool"})
"""Labels that every series gets when it is scraped by the chart's PodMonitor."""
_PARTS = {"histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True)
class Expression:
    """What an expression names, and the labels of its result."""

    labels: frozenset[str]
    names: frozenset[str]
    matchers: tuple[tuple[str, str], ...]


def emitted() -> dict[str, list[str]]:
    """Every series that can be scraped, with its labels.

    Ours are those that the code declares, which tests compare with docs/metrics.md and with a
    suite at work. Of SGLang's only those that a test sees on a real engine, without its labels.
    """
    series = {"up": TARGET}
    for row in declared().values():
        for part in _PARTS.get(row.type, ("",)):
            le = {"le"} if part == "_bucket" else set()
            series[row.name + part] = frozenset(row.labels) | TARGET | le
    for name in re.findall(r'"(sglang:\w+)"', _SGLANG.read_text(encoding="utf-8")):
        series.setdefault(name, TARGET)
    return {name: sorted(labels) for name, labels in series.items()}


def analyse(
    expressions: Sequence[str], recorded: dict[str, list[str]] | None = None
) -> list[Expression]:
    """Parse expressions, and fail where one names what nobody emits or a label that isn't there.

    Args:
        expressions: PromQL; Grafana's `$__rate_interval` and `${…}` must be replaced.
        recorded: series of recording rules, with their labels.
    """
    question = {"metrics": {**emitted(), **(recorded or {})}, "expressions": list(expressions)}
    ran = subprocess.run(
        [tool("promtool").parent / "python", _SCRIPT],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = json.loads(ran.stdout)
    wrong = [
        f"{text}\n    {problem}"
        for text, answer in zip(expressions, answers, strict=True)
        for problem in answer["problems"]
    ]
    assert not wrong, "\n" + "\n".join(wrong)
    return [
        Expression(
            frozenset(answer["labels"] or ()),
            frozenset(answer["names"]),
            tuple((label, value) for label, value in answer["matchers"]),
        )
        for answer in answers
    ]
