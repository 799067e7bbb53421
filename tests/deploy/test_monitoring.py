"""What the chart tells Prometheus, Grafana and scalers to read is what the services emit."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream_server.control.engine import Role
from millstream_server.runtime import errors
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.telemetry import metrics
from tests.support.deploy.deploy_tools import (
    CHART,
    NAMESPACE,
    RELEASE,
    ROOT,
    Manifest,
    objects,
    tool,
)
from tests.support.deploy.promql import Expression, analyse, emitted

Render = Callable[..., list[Manifest]]
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
RUNBOOK = ROOT / "docs" / "runbook.md"
ON = {
    "models": {"m": {"uri": "hf://org/m"}},
    "decode": {"enabled": True, "pools": {"main": {"model": "m"}}},
}
REASONS = {kind.reason for kind in vars(errors).values() if hasattr(kind, "reason")}
VALUES: Mapping[str, set[str]] = {
    "role": {role.value for role in Role},
    "component": {role.value for role in Role} - {"aggregated"} | {"processor"},
    "priority": {priority.name.lower() for priority in Priority},
    "error_type": REASONS | {"ABANDONED", ""},
    "outcome": REASONS | {"ABANDONED", "ok", "broken"},
    "rpc_response_status_code": {"OK"},
    "gen_ai_token_type": {"input", "cached", "output"},
    "side": {"receiver", "sender"},
    "stage": {"queue", "batch_queue"},
    "namespace": {NAMESPACE, "$namespace"},
    "job": {f"{RELEASE}-millstream", "$job"},
}
"""What may stand in matchers of these labels."""


def rules(manifests: list[Manifest]) -> list[dict[str, Any]]:
    """Return all rules, in their order."""
    (rule,) = objects(manifests, "PrometheusRule")
    return [rule for group in rule["spec"]["groups"] for rule in group["rules"]]


def analysed_rules(manifests: list[Manifest]) -> Iterator[tuple[dict[str, Any], Expression]]:
    """Each rule with its analysis; later ones may read what earlier ones record."""
    found = rules(manifests)
    recorded: dict[str, list[str]] = {}
    for recording in (True, False):
        # What is recorded reads metrics, and within a group what is recorded before.
        kept = [rule for rule in found if ("record" in rule) is recording]
        for rule in kept if recording else ():
            recorded[rule["record"]] = ["job", "model", "namespace"]
        answers = analyse([rule["expr"] for rule in kept], recorded)
        for rule, answer in zip(kept, answers, strict=True):
            if recording:
                assert sorted(answer.labels) == recorded[rule["record"]], rule
            yield rule, answer


def check_matchers(expression: Expression) -> None:
    """Labels with few values are matched with values that exist."""
    for label, value in expression.matchers:
        if label in VALUES and "$" not in value.replace("$namespace", "").replace("$job", ""):
            assert set(value.split("|")) <= VALUES[label], (label, value)


def test_rules_read_what_is_emitted(render: Render) -> None:
    for rule, expression in analysed_rules(render(values=ON)):
        check_matchers(expression)
        for text in rule.get("annotations", {}).values():
            used = set(re.findall(r"\$labels\.(\w+)", text))
            assert used <= expression.labels, (rule["alert"], used - expression.labels)


def test_each_rule_reads_only_this_release(render: Render) -> None:
    scope = f'namespace="{NAMESPACE}", job="{RELEASE}-millstream"'
    for rule in rules(render(values=ON)):
        selectors = re.findall(r"\{([^{}]*)\}", rule["expr"])
        assert selectors, rule
        assert all(one.startswith(scope) for one in selectors), rule


def test_the_scope_of_rules_can_be_set(render: Render) -> None:
    scope = 'cluster="one", job="front"'
    for rule in rules(render(values={**ON, "monitoring": {"scope": scope}})):
        assert scope in rule["expr"]
        assert f'namespace="{NAMESPACE}"' not in rule["expr"]


def test_alerts_say_what_to_do(render: Render) -> None:
    headings = set(re.findall(r"^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE))
    alerts = [rule for rule in rules(render(values=ON)) if "alert" in rule]
    assert {rule["alert"] for rule in alerts} == headings
    for rule in alerts:
        assert rule["for"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        page, _, heading = rule["annotations"]["runbook_url"].partition("#")
        assert page.endswith("/docs/runbook.md")
        assert heading == rule["alert"].lower()
        assert not re.search(r"\$\{", json.dumps(rule)), "something is not filled in"


def test_alerts_can_be_turned_off_and_labelled(render: Render) -> None:
    wanted = {"disabled": ["MillstreamKvCacheFull"], "alertLabels": {"team": "inference"}}
    before = rules(render(values=ON))
    after = rules(render(values={**ON, "monitoring": {"rules": wanted}}))
    assert len(after) == len(before) - 1
    assert all(rule["labels"]["team"] == "inference" for rule in after if "alert" in rule)


def test_objectives_are_bounds_of_the_histograms(render: Render) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    about = schema["properties"]["monitoring"]["properties"]["rules"]["properties"]
    bounds = about["objectives"]["properties"]
    for name, histogram in (
        ("firstToken", metrics.TIME_TO_FIRST_TOKEN),
        ("perToken", metrics.TIME_PER_OUTPUT_TOKEN),
    ):
        offered = bounds[name]["properties"]["seconds"]["enum"]
        assert set(offered) <= set(histogram._kwargs["buckets"])
        for seconds in (1, max(offered), min(offered)):
            values = {"rules": {"objectives": {name: {"seconds": seconds}}}}
            texts = [rule["expr"] for rule in rules(render(values={**ON, "monitoring": values}))]
            assert any(f'le="{float(seconds)}"' in text for text in texts)


def test_pods_are_scraped_with_the_labels_that_rules_read(render: Render) -> None:
    manifests = render(values=ON)
    (monitor,) = objects(manifests, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert {one["targetLabel"] for one in endpoint["relabelings"]} == {"job", "component", "pool"}
    selector = monitor["spec"]["selector"]["matchLabels"]
    for deployment in objects(manifests, "Deployment"):
        template = deployment["spec"]["template"]
        assert selector.items() <= template["metadata"]["labels"].items()
        for relabeling in endpoint["relabelings"][1:]:
            (source,) = relabeling["sourceLabels"]
            assert source in {
                "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label)
                for label in template["metadata"]["labels"]
            }
        named = [p for c in template["spec"]["containers"] for p in c.get("ports", ())]
        assert endpoint["port"] in {port["name"] for port in named}


@cache
def panels(path: Path) -> list[dict[str, Any]]:
    board = json.loads(path.read_text(encoding="utf-8"))
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def _plain(text: str) -> str:
    return text.replace("$__rate_interval", "5m")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_read_what_is_emitted(path: Path, render: Render) -> None:
    names = {rule["record"] for rule in rules(render(values=ON)) if "record" in rule}
    recorded = {name: ["job", "model", "namespace"] for name in names}
    targets = [target for panel in panels(path) for target in panel["targets"]]
    answers = analyse([_plain(target["expr"]) for target in targets], recorded)
    for target, answer in zip(targets, answers, strict=True):
        check_matchers(answer)
        assert 'namespace="$namespace", job="$job"' in target["expr"]
        used = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
        assert used <= answer.labels, target
    board = json.loads(path.read_text(encoding="utf-8"))
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert {"datasource", "namespace", "job", "model"} <= set(variables)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels(path))
    for variable in variables.values():
        if variable["type"] == "query":
            name = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", variable["query"])
            assert name
            assert name[2] in emitted()[name[1]]


def _dashboards(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    python = tool("promtool").parent / "python"
    script = ROOT / "deploy" / "helm" / "dashboards"
    return subprocess.run([python, script, *arguments], capture_output=True, text=True, check=False)


def test_dashboards_are_what_the_script_makes_and_grafana_reads() -> None:
    assert _dashboards("--check").stdout.strip() == ""
    checked = _dashboards("--check", *DASHBOARDS)
    assert (checked.returncode, checked.stdout.strip()) == (0, ""), checked.stderr


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (["graphToolTip"], 1, "graphToolTip: not in the schema"),
        (["tags"], "millstream", "is no list"),
        (["panels", 1, "gridPos", "w"], "wide", "is no int"),
        (["panels", 1, "targets", 0, "expression"], "up", "expression: not in the schema"),
        (["panels", 8, "options", "legend", "placement"], "left", "is none of"),
        (["panels", 8, "fieldConfig", "defaults", "custom", "fillOpacity"], "20", "is no float"),
        (["panels", 2, "id"], 2, "two have one id"),
    ],
)
def test_a_dashboard_that_grafana_would_misread_is_noticed(
    tmp_path: Path, at: list[Any], value: object, said: str
) -> None:
    board = json.loads((CHART / "dashboards" / "overview.json").read_text(encoding="utf-8"))
    place = board
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(board), encoding="utf-8")
    checked = _dashboards("--check", broken)
    assert (checked.returncode, said in checked.stdout) == (1, True), checked


def test_dashboards_are_config_maps_for_the_sidecar(render: Render) -> None:
    values = {"dashboards": {"enabled": True, "namespace": "grafana"}}
    maps = objects(render(values={**ON, "monitoring": values}), "ConfigMap")
    found = [one for one in maps if one["metadata"]["labels"].get("grafana_dashboard") == "1"]
    assert len(found) == len(DASHBOARDS)
    texts = {name: text for one in found for name, text in one["data"].items()}
    assert {name: json.loads(text) for name, text in texts.items()} == {
        path.name: json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS
    }
    assert {one["metadata"]["namespace"] for one in found} == {"grafana"}


def test_a_cluster_without_the_operator_gets_nothing_of_it(render: Render) -> None:
    kinds = {manifest["kind"] for manifest in render(values=ON, apis=())}
    assert not kinds & {"PodMonitor", "PrometheusRule", "ScaledObject"}


def test_the_queries_in_the_documentation_read_what_is_emitted() -> None:
    for page in ("metrics.md", "operations.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        blocks = re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
        assert blocks
        # A block of several lines that each are one expression, or one of several lines.
        expressions = [
            one
            for block in blocks
            for one in (block.splitlines() if page == "operations.md" else [block])
        ]
        for expression in analyse(expressions):
            check_matchers(expression)


def test_the_values_of_the_chart_name_real_metrics() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    roles = ["poolDefaults", "processor", "encode", "prefill", "decode", "diffusion", "embedding"]
    named = {
        metric["pods"]["metric"]["name"]
        for role in roles
        for metric in values[role]["autoscaling"].get("metrics", ())
        if metric["type"] == "Pods"
    }
    assert named <= set(emitted())
