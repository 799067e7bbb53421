"""Two examples render to what was reviewed: golden/NAME.yaml. `make chart` writes them anew.

The others are held by what the tests beside this one say of all renders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.deploy_tools import Manifest

GOLDEN = Path(__file__).parent / "golden"


def reviewed(manifests: list[Manifest]) -> list[Manifest]:
    """Leave out alerts, which are reviewed in their own files, and what each render makes anew."""
    return [
        {**one, "data": dict.fromkeys(one["data"], "made at random")}
        if one["kind"] == "Secret"
        else one
        for one in manifests
        if one["kind"] != "PrometheusRule"
    ]


@pytest.mark.parametrize(("name", "base"), [("single-gpu", None), ("multinode", "single-gpu")])
def test_an_example_renders_as_reviewed(
    name: str, base: str | None, render: Callable[..., list[Manifest]]
) -> None:
    # What is the same in the other one is in its file.
    same = reviewed(render(base)) if base else []
    manifests = [one for one in reviewed(render(name)) if one not in same]
    manifests.sort(key=lambda one: (one["kind"], one["metadata"]["name"]))
    text = yaml.safe_dump_all(manifests, width=120)
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("MILLSTREAM_WRITE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "`make chart`, then review the diff"
