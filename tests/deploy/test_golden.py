"""The examples render to what was reviewed: golden/NAME.yaml. `make chart` writes them anew."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploy.deploy_tools import Manifest, values_files

GOLDEN = Path(__file__).parent / "golden"
_LONG = 2000
_SAME_EVERYWHERE = {"PrometheusRule"}
"""Reviewed in their own files; once is enough here."""


def reviewable(value: Any) -> Any:
    """Shorten what nobody reads in a diff: dashboards."""
    if isinstance(value, dict):
        return {key: reviewable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [reviewable(part) for part in value]
    if isinstance(value, str) and len(value) > _LONG:
        return f"{len(value)} characters, sha256 {hashlib.sha256(value.encode()).hexdigest()}"
    return value


def without_secrets(manifest: Manifest) -> Manifest:
    """Hide what each render makes anew."""
    if manifest["kind"] != "Secret":
        return manifest
    return {**manifest, "data": dict.fromkeys(manifest["data"], "made at random")}


@pytest.mark.parametrize("name", values_files())
def test_an_example_renders_as_reviewed(name: str, render: Callable[..., list[Manifest]]) -> None:
    manifests = [
        reviewable(without_secrets(one))
        for one in render(name)
        if name == "all" or one["kind"] not in _SAME_EVERYWHERE
    ]
    manifests.sort(key=lambda one: (one["kind"], one["metadata"]["name"]))
    text = yaml.safe_dump_all(manifests, width=120)
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("MILLSTREAM_WRITE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "`make chart`, then review the diff"
